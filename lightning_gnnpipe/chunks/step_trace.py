"""The measured timeline of a training step: when each rank computed each chunk."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from lightning_gnnpipe.types import Phase


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """The computation of one chunk by one rank, in one phase.

    Times are microseconds since the step's first event on any rank of the host. `wait_us` is the
    time within it that the rank waited for other shards.
    """

    rank: int
    phase: Phase
    chunk: int
    start_us: float
    end_us: float
    wait_us: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Statistics of the last training step, gathered from all ranks.

    Attributes:
        num_stages: Stages, S.
        num_shards: Shards of the graph, G; rank `r` is shard `r % G` of stage `r // G % S`.
        num_chunks: Chunks, K; 1 if the step was exact.
        is_exact: Whether the step read nothing stale.
        bytes_by_kind: Payload bytes received, summed over ranks. `forward` and `backward`
            together are 2 (S-1) N D b for each tensor that crosses a cut, `output` is (S-1) N C b,
            and `weight_grad` (S-1) W, with one number more for each weight. D: its channels, C:
            outputs of a node, b: bytes of a number, W: bytes of all weights.
        bubble_frac: Share of both phases in which ranks did not compute: mean of `wait_s` divided
            by the length of both phases.
        wait_s: Seconds of the forward and backward phase in which each rank did not compute:
            between its chunks, and within them in exchanges with other shards. A phase lasts from
            the start of its first chunk on any stage to the end of its last. Outputs and loss are
            between the phases, and in neither.
        peak_memory_bytes: Peak memory of each rank's process so far: allocated by torch on its GPU,
            or resident on the CPU.
        events: The chunks' computations, sorted by start.
        num_replicas: Replicas, R; rank `r` is in replica `r // (G S)`.
    """

    num_stages: int
    num_shards: int
    num_chunks: int
    is_exact: bool
    bytes_by_kind: dict[str, int]
    bubble_frac: float
    wait_s: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    events: tuple[TraceEvent, ...]
    num_replicas: int = 1

    def rank_names(self) -> list[list[str]]:
        """Return the parts of each rank's name, for example "stage 1", "shard 0"."""
        sizes = {
            "replica": self.num_replicas,
            "stage": self.num_stages,
            "shard": self.num_shards,
        }
        named = [axis for axis, size in sizes.items() if size > 1 or axis == "stage"]
        places = product(*(range(sizes[axis]) for axis in named))
        return [[f"{axis} {i}" for axis, i in zip(named, one, strict=True)] for one in places]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's part of the statistics of a step."""

    events: list[TraceEvent]
    bytes_by_kind: dict[str, int]
    peak_memory_bytes: int


def merge_stats(
    gathered: Sequence[RankRecord],
    num_stages: int,
    num_chunks: int,
    is_exact: bool,
    num_replicas: int = 1,
) -> PipelineStats:
    """Merge the records of all ranks, in rank order."""
    events = _align(event for one in gathered for event in one.events)
    num_bytes = Counter[str]()
    for one in gathered:
        num_bytes.update(one.bytes_by_kind)
    span = sum(end - start for start, end in phases(events))
    ranks = range(len(gathered))
    busy = [sum(e.end_us - e.start_us - e.wait_us for e in events if e.rank == r) for r in ranks]
    waits = [max(0.0, span - one) for one in busy]
    return PipelineStats(
        num_stages,
        len(gathered) // (num_stages * num_replicas),
        num_chunks,
        is_exact,
        dict(sorted(num_bytes.items())),
        bubble_frac=sum(waits) / (len(waits) * span) if span else 0.0,
        wait_s=tuple(one / 1e6 for one in waits),
        peak_memory_bytes=tuple(one.peak_memory_bytes for one in gathered),
        events=events,
        num_replicas=num_replicas,
    )


def phases(events: Sequence[TraceEvent]) -> list[tuple[float, float]]:
    """Return start and end, in microseconds, of forward and of backward."""
    spans = [[e for e in events if e.phase == phase] for phase in ("forward", "backward")]
    return [(min(e.start_us for e in s), max(e.end_us for e in s)) for s in spans if s]


def _align(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Sort `events` by start, and count times from the first start."""
    ordered = sorted(events, key=lambda event: event.start_us)
    zero = ordered[0].start_us if ordered else 0.0
    return tuple(replace(e, start_us=e.start_us - zero, end_us=e.end_us - zero) for e in ordered)


_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak so far: allocated by torch on CUDA, else resident in the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
