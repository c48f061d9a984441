"""How far the learning rate has fallen, by which late gradients are damped."""

from __future__ import annotations

from collections.abc import Mapping


class LearningRates:
    """The largest learning rate of each group of parameters so far.

    Attributes:
        peaks: These rates, by optimizer and group.
    """

    def __init__(self) -> None:
        self.peaks: Mapping[tuple[int, int], float] = {}

    def share(self, rates: Mapping[tuple[int, int], float]) -> float:
        """Return the share of its largest that the rate has which has fallen least; from 0 to 1.

        Args:
            rates: The present ones, by optimizer and group. Where there are none, the share is 1;
                below 0, it is 0.
        """
        largest = {group: max(rate, self.peaks.get(group, rate)) for group, rate in rates.items()}
        self.peaks = {**self.peaks, **largest}
        shares = [rate / largest[group] for group, rate in rates.items() if largest[group] > 0]
        return max(0.0, *shares) if shares else 1.0
