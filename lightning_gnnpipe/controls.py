"""What callbacks ask of the next training step; the engine reads it when the step starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

OnChunk = Callable[[int, int], None]


@dataclass(slots=True)
class Controls:
    """Requests for the next training step.

    Every request is off after each step. Callbacks only switch requests on, in
    `on_train_batch_start` or before, so that the order of callbacks does not matter.

    Attributes:
        is_exact: Run the exact schedule: the whole graph as one chunk, no stale read. All histories
            are written.
        refreshes: Recompute all histories by an exact pass, dropout off, before the step, unless
            validation has just written them.
        takes_validation: Let a validation that runs before the step write the histories.
        reads_snapshot: Take stale rows from the last snapshot, if there is one.
        takes_snapshot: Take a snapshot of all rows after the forward pass.
        records_staleness: Record who reads whom stale, and how far rows drift.
        is_synchronous: Shards of the graph wait for each other's rows, in a step that would use
            those of the step before.
        on_chunk: Called on this rank after each chunk of a training step, forward and backward,
            with how many it has computed so far and how many it will: twice the chunks.
    """

    is_exact: bool = False
    refreshes: bool = False
    takes_validation: bool = False
    reads_snapshot: bool = False
    takes_snapshot: bool = False
    records_staleness: bool = False
    is_synchronous: bool = False
    on_chunk: OnChunk | None = None

    def reset(self) -> None:
        """Switch everything off."""
        for field in fields(self):
            setattr(self, field.name, field.default)
