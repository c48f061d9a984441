"""How far the learning rate has fallen, by which late gradients are damped."""

from __future__ import annotations

from collections.abc import Sequence


class LearningRates:
    """The largest learning rate of each group of parameters so far.

    Attributes:
        peaks: These rates, in the order of the groups.
    """

    def __init__(self) -> None:
        self.peaks: tuple[float, ...] = ()

    def forget(self) -> None:
        """Begin anew."""
        self.peaks = ()

    def share(self, rates: Sequence[float]) -> float:
        """Return the share of its largest that the rate has which has fallen least; from 0 to 1.

        Args:
            rates: The present ones, of each group; groups that are new stand behind the others.
                Where there are none, the share is 1; below 0, it is 0.
        """
        known = (*self.peaks, *rates[len(self.peaks) :])
        self.peaks = tuple(max(pair) for pair in zip(rates, known, strict=False))
        shares = [rate / peak for rate, peak in zip(rates, self.peaks, strict=True) if peak > 0]
        return max(0.0, *shares) if shares else 1.0
