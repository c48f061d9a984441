"""The few switches that callbacks may flip; the engine reads them when a training step starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

OnChunk = Callable[[int, int], None]


@dataclass(slots=True)
class Controls:
    """What the next training steps do.

    Attributes:
        is_exact: Run the exact schedule: the whole graph as one chunk, no stale read. All histories
            are written.
        refreshes: Recompute all histories by an exact pass, dropout off, before the step.
        records_staleness: Record who reads whom stale, and how far rows drift.
        is_synchronous: Shards of the graph wait for each other's rows, in a step that would use
            those of the step before.
        on_chunk: Called on this rank after each chunk of a training step, forward and backward,
            with how many it has computed so far and how many it will: twice the chunks.
    """

    is_exact: bool = False
    refreshes: bool = False
    records_staleness: bool = False
    is_synchronous: bool = False
    on_chunk: OnChunk | None = None

    def reset(self) -> None:
        """Switch everything off."""
        for field in fields(self):
            setattr(self, field.name, field.default)
