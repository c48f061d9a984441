"""Functions of the edges alone (degrees, Laplacians), computed on the whole graph, cut by chunk.

They need all edges of a node, but a halo node's edges lie in other chunks. Their inputs do not
change between steps, so results are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing.sparse import Adjacency, Pattern

Compute = Callable[[], tuple[Tensor, Tensor | None]]


@dataclass(slots=True, eq=False)
class WholeEdges:
    """Edges of the graph, sorted by target, with values (None for ones) computed from `source`."""

    source: Tensor | None
    edges: Tensor
    values: Tensor | None
    pattern: Pattern | None
    parts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by chunk
    adjacencies: dict[bool, Adjacency] = field(default_factory=dict)  # by `is_mean`


class EdgeFunctions:
    """Cache of functions of the edges of one graph."""

    def __init__(self, plan: ChunkPlan) -> None:
        self._plan = plan
        self._known: dict[Hashable, WholeEdges] = {}
        self._owners: dict[int, tuple[WholeEdges, int]] = {}
        self._has_groups: dict[tuple[ChunkPlan, int], bool] = {}
        # Sparse matrices for layers, by the id of their edges: edges, source of the values, matrix.
        self.matrices: dict[int, tuple[Tensor, Tensor | None, Any]] = {}

    def has_groups(self, edges: ChunkPlan, size: int) -> bool:
        """Whether every `size` user edges share a target and stay together in the plan `edges`."""
        if (edges, size) not in self._has_groups:
            target = edges.whole.chunks[0].edge_index[1]
            edge = edges.edge_perm
            is_whole = edge.numel() % size == 0
            if is_whole:
                first = edge[::size].repeat_interleave(size)
                place = torch.arange(edge.numel(), device=edge.device) % size
                is_same = target == target[::size].repeat_interleave(size)
                is_whole = bool(((edge == first + place) & (first % size == 0) & is_same).all())
            self._has_groups[edges, size] = is_whole
        return self._has_groups[edges, size]

    def part(
        self, key: Hashable, source: Tensor | None, chunk: Chunk, compute: Compute
    ) -> tuple[Tensor, Tensor]:
        """Return edges that end in `chunk`, `[2, E']` local indices, with one value each.

        `key` identifies the function and its options. `compute` returns positions `[2, E'']` and
        values for the whole graph. It runs again if `source`, its edge weights, is a new tensor.
        """
        known = self._get(key, source, compute, is_sorted=False)
        place = -1 if chunk.is_whole else chunk.index
        if place not in known.parts:
            with torch.inference_mode(False), torch.no_grad():
                is_all = place < 0 and self._plan.num_rows == self._plan.num_nodes
                assert known.values is not None
                whole = known.edges, known.values
                known.parts[place] = whole if is_all else _cut(*whole, chunk)
            self._owners[id(known.parts[place][0])] = known, place
        return known.parts[place]

    def adjacency(self, edges: Tensor, values: Tensor | None, *, is_mean: bool) -> Adjacency | None:
        """Return the matrix for `edges` and `values` that `part` returned; None for any other."""
        known, place = self._owners.get(id(edges), (None, 0))
        part = (None, None) if known is None else known.parts[place]
        is_known = part[0] is edges and part[1] is values
        return self._matrix(known, is_mean) if known and is_known else None

    def batch_adjacency(
        self, key: Hashable, edges: Tensor, weight: Tensor | None, *, is_mean: bool
    ) -> Adjacency:
        """Return the matrix of the batch's edges and weights, sorted by target."""
        known = self._get(("batch", key), weight, lambda: (edges, weight), is_sorted=True)
        return self._matrix(known, is_mean)

    def _get(
        self, key: Hashable, source: Tensor | None, compute: Compute, *, is_sorted: bool
    ) -> WholeEdges:
        known = self._known.get(key)
        if known is not None and known.source is source:
            return known
        pattern = known.pattern if known is not None and is_sorted else None
        if known is not None:
            for edges, _ in known.parts.values():
                self._owners.pop(id(edges), None)
        with torch.inference_mode(False), torch.no_grad():
            edges, values = compute()
            if not is_sorted:
                target, order = edges[1].sort(stable=True)
                edges = torch.stack([edges[0][order], target])
                values = None if values is None else values[order]
            edges, values = self._plan.localize(edges, values)
        made = self._known[key] = WholeEdges(source, edges, values, pattern)
        return made

    def _matrix(self, known: WholeEdges, is_mean: bool) -> Adjacency:
        if is_mean not in known.adjacencies:
            if known.pattern is None:
                owner = self._plan.chunk_of_row()
                known.pattern = Pattern(known.edges, self._plan.num_rows, owner)
            known.adjacencies[is_mean] = Adjacency(known.pattern, known.values, is_mean=is_mean)
        return known.adjacencies[is_mean]


def _cut(edges: Tensor, values: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([chunk.start, chunk.end], device=edges.device)
    first, last = torch.searchsorted(edges[1].contiguous(), bounds).tolist()
    source, target = edges[:, first:last]
    is_own = (source >= chunk.start) & (source < chunk.end)
    in_halo = torch.searchsorted(chunk.halo, source) + chunk.num_nodes
    local = torch.where(is_own, source - chunk.start, in_halo)
    return torch.stack([local, target - chunk.start]), values[first:last]
