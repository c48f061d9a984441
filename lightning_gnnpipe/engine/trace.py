"""What happened when: the measured timeline of one training step, and shares taken from it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One action of one rank.

    Times are microseconds since the step's first action on any rank of the host.
    """

    rank: int
    action: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """The last training step, over all ranks.

    Attributes:
        num_stages: Stages, S.
        num_chunks: Chunks, K; 1 if the step was exact.
        is_exact: Whether the step ran the exact schedule.
        bytes_by_kind: Payload bytes received, summed over ranks; `forward`, `backward` and `output`
            are those of the formula 2 (S-1) N D b + (S-1) N C b.
        bubble_frac: Share of the ranks' time, forward and backward phase, in which they did not
            compute.
        events: Compute actions (F, B), sorted by start.
    """

    num_stages: int
    num_chunks: int
    is_exact: bool
    bytes_by_kind: dict[str, int]
    bubble_frac: float
    events: tuple[TraceEvent, ...]


@dataclass(slots=True)
class Recorder:
    """Times the compute actions of this rank."""

    rank: int
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def record(self, action: str) -> Iterator[None]:
        """Time the block as `action`."""
        start = time.perf_counter()
        yield
        self.spans.append((action, start, time.perf_counter()))

    def read(self) -> list[TraceEvent]:
        """Return the events on this host's monotonic clock."""
        return [TraceEvent(self.rank, a, start * 1e6, end * 1e6) for a, start, end in self.spans]


def merge_stats(
    gathered: Sequence[tuple[list[TraceEvent], dict[str, int]]],
    num_stages: int,
    num_chunks: int,
    is_exact: bool,
) -> PipelineStats:
    """Put the events and bytes of all ranks together."""
    events = _align(event for one, _ in gathered for event in one)
    kinds = {kind for _, received in gathered for kind in received}
    total = {kind: sum(received.get(kind, 0) for _, received in gathered) for kind in sorted(kinds)}
    return PipelineStats(
        num_stages, num_chunks, is_exact, total, _bubble_frac(events, num_stages), events
    )


def _align(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Return `events` sorted by start and counted from the first one."""
    ordered = sorted(events, key=lambda event: event.start_us)
    zero = ordered[0].start_us if ordered else 0.0
    return tuple(TraceEvent(e.rank, e.action, e.start_us - zero, e.end_us - zero) for e in ordered)


def _bubble_frac(events: Sequence[TraceEvent], num_stages: int) -> float:
    """Return 1 - busy / (S span).

    The span is that of the forward phase plus that of the backward phase.
    """
    span = 0.0
    for is_backward in (False, True):
        phase = [e for e in events if ("B" in e.action) == is_backward]
        if phase:
            span += max(e.end_us for e in phase) - min(e.start_us for e in phase)
    busy = sum(e.end_us - e.start_us for e in events)
    return max(0.0, 1.0 - busy / (num_stages * span)) if span else 0.0
