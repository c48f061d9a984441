"""The figures of a training step, made up: what the engine would measure of a drawn timetable."""

from __future__ import annotations

from lightning_gnnpipe.chunks import PipelineStats, TraceEvent
from lightning_gnnpipe.chunks.step_trace import RankRecord, merge_stats


def make_stats(
    *rows: str,
    slot_us: float = 100.0,
    num_chunks: int = 2,
    bytes_by_kind: dict[str, int] | None = None,
    num_virtual: int = 1,
) -> PipelineStats:
    """Return the figures of ``rows``, one a rank, such as ``F0 F1 .. B1 B0``; two dots are idle.

    With several stages on a rank, actions name their stage: ``0F0 2F0 .. 2B0 0B0``.
    """
    records = []
    for rank, row in enumerate(rows):
        events = [
            TraceEvent(rank, action, 5e6 + slot_us * i, 5e6 + slot_us * (i + 1))
            for i, slot in enumerate(row.split())
            for action in [slot if slot[0].isdigit() else f"{rank}{slot}"]
            if slot != ".."
        ]
        records.append(RankRecord(events, dict(bytes_by_kind or {}), 2**20 * (rank + 1)))
    num_stages = len(rows) * num_virtual
    return merge_stats(records, num_stages, num_chunks, is_exact=False, num_virtual=num_virtual)
