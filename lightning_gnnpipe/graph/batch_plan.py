"""A mini-batch of graphs assigned to micro-batches: whole graphs, with about the same work each.

Goes in: the work of each graph. Comes out: micro-batches, each a run of graphs in an order of their
own. Graphs are assigned largest first, each to the micro-batch with the least work so far, which
is at most a third longer than the best. Source: Graham, "Bounds on multiprocessing timing
anomalies" (1969).

A graph without nodes goes where the next graph with nodes is: models that count graphs by the batch
vector then find as many in a micro-batch as there are.

    graphs           0   1   2   3   4        micro-batch 0: graphs 0, 3
    nodes            9   4   0   6   0        micro-batch 1: graphs 1, ...
    micro-batch      0   1   1   1   1        graphs 2 and 4 go with graph 3
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some of the graphs of a mini-batch.

    Attributes:
        index: Its number, from 0.
        start: The first of its graphs, in the order of all micro-batches.
        end: The one behind the last.
        work: What its time is taken to be proportional to.
        is_whole: Whether it is all there is.
    """

    index: int
    start: int
    end: int
    work: int
    is_whole: bool

    @property
    def span(self) -> tuple[int, int]:
        """First graph, and the one behind the last."""
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A mini-batch cut into micro-batches.

    Attributes:
        order: The graphs, one micro-batch behind the other; ascending in each.
        chunks: The micro-batches.
        shard: None: each stage has them all.
    """

    order: tuple[int, ...]
    chunks: tuple[MicroBatch, ...]
    shard: None = None

    @property
    def num_chunks(self) -> int:
        """Micro-batches, K."""
        return len(self.chunks)


def plan_micro_batches(work: Sequence[int], sizes: Sequence[int], num_chunks: int) -> BatchPlan:
    """Assign graphs to micro-batches.

    Args:
        work: For each graph what its time is proportional to.
        sizes: For each graph its number of nodes.
        num_chunks: Micro-batches, K; no more are made than there are graphs with nodes.
    """
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
