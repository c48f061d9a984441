"""Assign the graphs of a mini-batch to micro-batches of about equal work.

Largest first, to the micro-batch with the least work: at most a third longer than the optimum.
Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).

A graph without nodes goes with the next graph that has nodes, at the end with the last. Models that
count graphs by the batch vector then find the right number in each micro-batch.

    graphs           0   1   2   3   4        micro-batch 0: graph 0
    nodes            9   4   0   6   0        micro-batch 1: graphs 1, 2, 3, 4
    micro-batch      0   1   1   1   1        graphs 2 and 4 go with graph 3
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Graphs `start` to `end - 1` of `BatchPlan.order`; their time is proportional to `work`."""

    index: int
    start: int
    end: int
    work: int
    is_whole: bool

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A mini-batch cut into micro-batches; `order` lists graphs, micro-batch by micro-batch."""

    order: tuple[int, ...]  # ascending in each micro-batch
    chunks: tuple[MicroBatch, ...]
    shard: None = None  # each stage has all micro-batches

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)


def plan_micro_batches(work: Sequence[int], sizes: Sequence[int], num_chunks: int) -> BatchPlan:
    """Assign graphs to `num_chunks` micro-batches, or fewer if fewer graphs have nodes."""
    filled = [graph for graph, size in enumerate(sizes) if size]
    num_chunks = max(1, min(num_chunks, len(filled)))
    owner = [0] * len(sizes)
    least = [(0, index) for index in range(num_chunks)]
    for graph in sorted(filled, key=lambda graph: (-work[graph], graph)):
        load, index = least[0]
        heapq.heapreplace(least, (load + max(work[graph], 1), index))
        owner[graph] = index
    following = owner[filled[-1]] if filled else 0
    for graph in reversed(range(len(sizes))):
        if sizes[graph]:
            following = owner[graph]
        owner[graph] = following
    order = tuple(sorted(range(len(sizes)), key=lambda graph: (owner[graph], graph)))
    loads = {index: load for load, index in least}
    counts = Counter(owner)
    chunks, start = [], 0
    for index in range(num_chunks):
        end = start + counts[index]
        chunks.append(MicroBatch(index, start, end, loads[index], num_chunks == 1))
        start = end
    return BatchPlan(order, tuple(chunks))
