"""The figures of a training step, made up: what the engine would measure of a drawn timetable."""

from __future__ import annotations

from lightning_gnnpipe.chunks import PipelineStats, TraceEvent
from lightning_gnnpipe.chunks.step_trace import RankRecord, merge_stats
from lightning_gnnpipe.types import Phase


def make_stats(
    *rows: str,
    slot_us: float = 100.0,
    num_chunks: int = 2,
    bytes_by_kind: dict[str, int] | None = None,
) -> PipelineStats:
    """Return the figures of ``rows``, one a rank, such as ``F0 F1 .. B1 B0``; two dots are idle."""
    phases: dict[str, Phase] = {"F": "forward", "B": "backward"}
    records = []
    for rank, row in enumerate(rows):
        events = [
            TraceEvent(
                rank, phases[slot[0]], int(slot[1:]), 5e6 + slot_us * i, 5e6 + slot_us * (i + 1)
            )
            for i, slot in enumerate(row.split())
            if slot != ".."
        ]
        records.append(RankRecord(events, dict(bytes_by_kind or {}), 2**20 * (rank + 1)))
    return merge_stats(records, len(rows), num_chunks, is_exact=False)
