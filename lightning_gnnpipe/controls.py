"""Requests of callbacks for the next training step; the engine reads them at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

OnChunk = Callable[[int, int], None]


@dataclass(slots=True)
class Controls:
    """Requests for the next training step; each step switches them off again.

    Callbacks only switch requests on, in `on_train_batch_start` or before, so the order of
    callbacks
    does not matter.

    Attributes:
        is_exact: Run the whole graph as one chunk, without stale reads; writes all histories.
        refreshes: Recompute all histories before the step, by an exact pass without dropout, unless
            validation has just written them.
        takes_validation: Let a validation before the step write the histories.
        reads_snapshot: Read stale rows from the last snapshot, if there is one.
        takes_snapshot: Take a snapshot of all rows after the forward pass.
        records_staleness: Record which chunks are read stale, and how far rows drift.
        is_synchronous: Let shards wait for each other's rows, even with `async_halo`.
        on_chunk: Called on this rank after each chunk, forward and backward, with the number of
            chunks done and the total, twice the number of chunks.
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
        """Switch all requests off."""
        for field in fields(self):
            setattr(self, field.name, field.default)
