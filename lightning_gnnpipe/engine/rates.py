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

    def share(self, rates: Sequence[float]) -> float:
        """Return the share of its largest that the rate has which has fallen least; from 0 to 1.

        Args:
            rates: The present ones, of each group; where there are none, the share is 1.
        """
        known = self.peaks if len(self.peaks) == len(rates) else rates
        self.peaks = tuple(map(max, rates, known))
        shares = [rate / peak for rate, peak in zip(rates, self.peaks, strict=True) if peak > 0]
        return max(shares, default=1.0)
