"""The figures of a training step, made up: what the engine would measure of a drawn timetable."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnnpipe.chunks import PipelineStats, TraceEvent
from lightning_gnnpipe.chunks.step_trace import RankRecord, merge_stats


def make_stats(
    *rows: str,
    slot_us: float = 100.0,
    num_chunks: int = 2,
    bytes_by_kind: dict[str, int] | None = None,
) -> PipelineStats:
    """Return the figures of ``rows``, one a rank, such as ``F0 F1 .. B1 B0``; two dots are idle."""
    records = [
        RankRecord(
            _events(rank, row.split(), slot_us), dict(bytes_by_kind or {}), 2**20 * (rank + 1)
        )
        for rank, row in enumerate(rows)
    ]
    return merge_stats(records, len(rows), num_chunks, is_exact=False)


def _events(rank: int, slots: Sequence[str], slot_us: float) -> list[TraceEvent]:
    return [
        TraceEvent(rank, f"{rank}{action}", 5e6 + slot_us * i, 5e6 + slot_us * (i + 1))
        for i, action in enumerate(slots)
        if action != ".."
    ]
