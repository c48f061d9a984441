"""Balance the weights of chunks by moving the nodes that cut the fewest additional edges.

Heavy nodes are packed first. Light nodes always find room: the lightest chunk is below the mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCE = 0.05


def rebalance(assignment: Tensor, weights: Tensor, links: Tensor, num_chunks: int) -> Tensor:
    """Return `assignment` with no empty chunk and none more than 5 % above the mean weight.

    Exceptions: a single node above the bound, or nodes above 5 % of the mean that longest-first
    packing cannot fit. Deterministic. `links`: `[2, num_links]`, in both directions.
    """
    mean = int(weights.sum()) / num_chunks
    limit = max(int((1 + _TOLERANCE) * mean), int(weights.max()))
    is_light = weights <= _TOLERANCE * mean
    assignment = _pack_heavy(assignment.clone(), weights, is_light, limit, num_chunks)
    assignment = _fill_empty(assignment, weights, num_chunks)
    loads = torch.bincount(assignment, weights.double(), minlength=num_chunks).long()
    state = _Loads(assignment, weights, loads, limit)
    for chunk in loads.argsort(descending=True, stable=True).tolist():
        if int(loads[chunk]) > limit:
            _drain(state, links, chunk, is_light)
    return assignment


@dataclass(frozen=True, slots=True, eq=False)
class _Loads:
    """Moves change `assignment`, `[num_nodes]`, and `loads`, `[num_chunks]`, in place."""

    assignment: Tensor
    weights: Tensor
    loads: Tensor
    limit: int


def _pack_heavy(
    assignment: Tensor, weights: Tensor, is_light: Tensor, limit: int, num_chunks: int
) -> Tensor:
    """Move heavy nodes if the heavy nodes of one chunk alone exceed the limit."""
    heavy = (~is_light).nonzero().flatten()
    heavy = heavy[weights[heavy].argsort(descending=True, stable=True)]
    sizes, homes = weights[heavy].tolist(), assignment[heavy].tolist()
    loads = [0] * num_chunks
    kept: list[int | None] = []
    for size, home in zip(sizes, homes, strict=True):
        fits = loads[home] + size <= limit
        kept.append(home if fits else None)
        loads[home] += size if fits else 0
    anew = _longest_first(sizes, [None] * len(sizes), [0] * num_chunks)
    choices = [homes, _longest_first(sizes, kept, loads), anew]
    # The first choice within the limit, else the closest.
    best = min(choices, key=lambda chunks: max(limit, _heaviest(sizes, chunks, num_chunks)))
    assignment[heavy] = torch.tensor(best, dtype=assignment.dtype)
    return assignment


def _longest_first(sizes: list[int], kept: Sequence[int | None], loads: list[int]) -> list[int]:
    """Assign each size without a chunk to the lightest chunk; `sizes` descend."""
    # Source: Graham, Bounds on multiprocessing timing anomalies (1969), longest processing time.
    heap = [(load, chunk) for chunk, load in enumerate(loads)]
    heapq.heapify(heap)
    chosen = []
    for size, home in zip(sizes, kept, strict=True):
        if home is None:
            load, home = heap[0]
            heapq.heapreplace(heap, (load + size, home))
        chosen.append(home)
    return chosen


def _heaviest(sizes: list[int], chunks: list[int], num_chunks: int) -> int:
    loads = [0] * num_chunks
    for size, chunk in zip(sizes, chunks, strict=True):
        loads[chunk] += size
    return max(loads)


def _fill_empty(assignment: Tensor, weights: Tensor, num_chunks: int) -> Tensor:
    """Move a node into each empty chunk; each non-empty chunk keeps its heaviest."""
    empty = (torch.bincount(assignment, minlength=num_chunks) == 0).nonzero().flatten()
    if empty.numel() == 0:
        return assignment
    order = weights.argsort(descending=True, stable=True)
    by_chunk = order[assignment[order].argsort(stable=True)]
    chunks = assignment[by_chunk]
    is_spare = torch.ones_like(assignment, dtype=torch.bool)
    is_spare[by_chunk[torch.cat([chunks[:1] >= 0, chunks[1:] != chunks[:-1]])]] = False
    assignment[order[is_spare[order]][: empty.numel()]] = empty
    return assignment


def _drain(state: _Loads, links: Tensor, chunk: int, is_movable: Tensor) -> None:
    """Move nodes out of `chunk`, a quarter of its excess at a time, until it keeps the limit."""
    links = links[:, (state.assignment == chunk)[links[0]]]
    while int(state.loads[chunk]) > state.limit:
        nodes = ((state.assignment == chunk) & is_movable).nonzero().flatten()
        nodes, targets = _best_moves(state, links, chunk, nodes)
        sizes = state.weights[nodes]
        fits = _running_sum(sizes, targets) <= (state.limit - state.loads)[targets]
        nodes, targets, sizes = nodes[fits], targets[fits], sizes[fits]
        quota = max(1, (int(state.loads[chunk]) - state.limit) // 4)
        is_due = sizes.cumsum(0) - sizes < quota
        nodes, targets, sizes = nodes[is_due], targets[is_due], sizes[is_due]
        if nodes.numel() == 0:
            return
        state.assignment[nodes] = targets
        state.loads.index_add_(0, targets, sizes)
        state.loads[chunk] -= sizes.sum()


def _best_moves(state: _Loads, links: Tensor, chunk: int, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and target chunks with room, fewest additional cuts per unit of weight first."""
    num_chunks, num_nodes = state.loads.numel(), nodes.numel()
    rank = torch.full_like(state.assignment, -1)
    rank[nodes] = torch.arange(num_nodes)
    row = rank[links[0]]
    keys = (row * num_chunks + state.assignment[links[1]])[row >= 0]
    pairs, counts = torch.unique(keys, return_counts=True)
    row, target = pairs // num_chunks, pairs % num_chunks
    is_home = target == chunk
    home = torch.zeros(num_nodes, dtype=torch.int64)
    home[row[is_home]] = counts[is_home]

    room = state.limit - state.loads
    row = torch.cat([row, torch.arange(num_nodes)])
    target = torch.cat([target, room.argmax().expand(num_nodes)])  # always a candidate
    counts = torch.cat([counts, counts.new_zeros(num_nodes)])
    sizes = state.weights[nodes]
    can = (target != chunk) & (sizes[row] <= room[target])
    row, target, counts = row[can], target[can], counts[can]

    order = ((home[row] - counts) / sizes[row]).argsort(stable=True)
    first = torch.full((num_nodes,), order.numel())
    first = first.scatter_reduce(0, row[order], torch.arange(order.numel()), "amin").sort().values
    chosen = order[first[first < order.numel()]]
    return nodes[row[chosen]], target[chosen]


def _running_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Return for each value the sum of its group up to and including it."""
    order = groups.argsort(stable=True)
    total = values[order].cumsum(0)
    sizes = torch.bincount(groups)
    before = torch.cat([total.new_zeros(1), total])[sizes.cumsum(0) - sizes]
    sums = torch.empty_like(values)
    sums[order] = total - before[groups[order]]
    return sums
