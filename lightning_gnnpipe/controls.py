"""The few switches that callbacks may flip; the engine reads them when a training step starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Controls:
    """What the next training steps do.

    Attributes:
        is_exact: Run the exact schedule: the whole graph as one chunk, no stale read. All histories
            are written.
        serves_snapshot: Stale reads come from a snapshot of the histories.
        takes_snapshot: Renew the snapshot at the end of the step. An exact step renews it in any
            case.
        refreshes: Recompute all histories by an exact pass, dropout off, before the step.
        records_staleness: Record who reads whom stale, and how far rows drift.
    """

    is_exact: bool = False
    serves_snapshot: bool = False
    takes_snapshot: bool = False
    refreshes: bool = False
    records_staleness: bool = False

    def reset(self) -> None:
        """Switch everything off."""
        for name in self.__slots__:
            setattr(self, name, False)
