"""The edges of a graph as layers on its chunks see them, and functions of the edges alone.

Degrees and Laplacians need all edges of a node, but a boundary node's edges lie in other chunks.
They are computed on the whole graph, once, and cut by chunk: their inputs stay between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing.sparse import Adjacency, Keep, Pattern

Compute = Callable[[], tuple[Tensor, Tensor | None]]
WHOLE = -1  # place of the whole graph, or of the whole shard


@dataclass(slots=True, eq=False)
class WholeEdges:
    """Edges of the graph, sorted by target, with values (None for ones) computed from `source`."""

    source: Tensor | None
    pattern: Pattern
    values: Tensor | None
    adjacencies: dict[bool, Adjacency] = field(default_factory=dict)  # by `is_mean`

    @property
    def num_bytes(self) -> int:
        own = 0 if self.values is None or self.values is self.source else self.values.nbytes
        made = sum(one.num_bytes for one in self.adjacencies.values())
        return own + made + self.pattern.num_bytes


class EdgeBytes(NamedTuple):
    """Bytes that layers keep for each edge.

    `matrices`: in sparse matrices. `ends`: in edges with self-loops and weights, of the chunks and,
    for exact passes on all nodes, of the whole graph. `results`: in edges with self-loops, of the
    chunks alone.
    """

    matrices: float
    ends: float
    results: float


class Part(NamedTuple):
    """A chunk's part of a function of the edges, which was called with `weight`."""

    weight: Tensor | None
    edges: Tensor  # `[2, E']` local indices
    values: Tensor
    of: WholeEdges


@dataclass(eq=False)
class LocalEdges:
    """A chunk with the edges of one set, in one direction.

    Attributes:
        place: Index of the chunk, or `WHOLE`.
        edge_set: None if the chunk has the edges of several sets.
        is_reverse: Whether messages flow against the batch's edges.
        plan: The plan with these edges.
        whole: The whole graph (all shards) as one chunk with these edges.
        parts: The chunk's parts of functions of these edges, by function and options.
        results: By id of edges: these, and what functions of them alone return in all steps.
    """

    place: int
    edge_set: int | None
    is_reverse: bool
    plan: ChunkPlan
    chunk: Chunk
    whole: Chunk
    parts: dict[Hashable, Part] = field(default_factory=dict)
    results: dict[int, tuple[Tensor, dict[Hashable, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keep_results_of(self.chunk.edge_index)

    def keep_results_of(self, edges: Tensor) -> None:
        """Keep what functions of `edges` return: they stay the same in all steps."""
        self.results[id(edges)] = edges, {}

    def owner(self, edges: Tensor, values: Tensor | None) -> WholeEdges | None:
        """Return what `edges` and `values` are a part of; None for any other tensors."""
        found = (one for one in self.parts.values() if one.edges is edges and one.values is values)
        part = next(found, None)
        return None if part is None else part.of

    @cached_property
    def are_numbered(self) -> Tensor:
        """Whether PyG counts each of the chunk's nodes: up to the largest index of the edges."""
        return self.plan.perm[self.chunk.start : self.chunk.end] < self._count

    @cached_property
    def all_numbered(self) -> Tensor:
        """The same of the nodes of all chunks and shards."""
        return self.plan.globe.perm < self._count

    @cached_property
    def _count(self) -> int:
        nodes = self.plan.globe.perm[self.whole.edge_index]
        return int(nodes.max()) + 1 if nodes.numel() else 0


class GraphEdges:
    """The edges of one graph by chunk, set and direction, and what was computed from them.

    All contexts over the chunks of `plan` share one. `keep`: see `Pattern`.
    """

    def __init__(self, plan: ChunkPlan, keep: Keep) -> None:
        self.plan, self.keep = plan, keep
        self._local: dict[tuple[int, int | None, bool], LocalEdges] = {}
        self.by_tensor: dict[int, LocalEdges] = {}  # by the id of their edges
        self._known: dict[Hashable, WholeEdges] = {}
        # Sparse matrices for layers, by the id of their edges: edges, source of the values, matrix.
        self.matrices: dict[int, tuple[Tensor, Tensor | None, Any]] = {}
        self.are_several = plan.num_edge_sets > 1
        self.sees_all = plan.shard is None  # whether the whole graph is on this rank

    def on(self, chunk: Chunk) -> LocalEdges:
        """Return the chunk with all edges that end in it."""
        place = WHOLE if chunk.is_whole else chunk.index
        sets = [self.at(place, i, is_reverse=False) for i in range(self.plan.num_edge_sets)]
        return self.at(place, None, is_reverse=False) if self.are_several else sets[0]

    def at(self, place: int, edge_set: int | None, *, is_reverse: bool) -> LocalEdges:
        """Return a chunk with the edges of one set, that end in it or, reversed, start in it."""
        key = place, edge_set, is_reverse
        if key not in self._local:
            plan = self.plan.reverse if is_reverse else self.plan
            plan = plan if edge_set is None else plan.edge_set(edge_set)
            chunk = plan.whole.chunks[0] if place == WHOLE else plan.chunks[place]
            made = LocalEdges(*key, plan, chunk, plan.globe.whole.chunks[0])
            self._local[key] = self.by_tensor[id(chunk.edge_index)] = made
        return self._local[key]

    def bytes_of(self, chunk: Chunk) -> EdgeBytes:
        """Return what layers keep for each edge, measured on `chunk`, which has run."""
        place = WHOLE if chunk.is_whole else chunk.index
        local = [one for one in self._local.values() if one.place == place]
        parts = [part.edges for one in local for part in one.parts.values()]
        found = [made for one in local for _, made in one.results.values()]
        results = [made for one in found for made, _ in one.values()]
        matrices = sum(one.num_bytes for one in self._known.values())
        num_edges = max(chunk.edge_index.size(1), 1)
        ends, more = (sum(one.nbytes for one in kept) / num_edges for kept in (parts, results))
        return EdgeBytes(matrices / max(self.plan.num_edges, 1), ends, more)

    def part(
        self,
        at: LocalEdges,
        key: Hashable,
        weight: Tensor | None,
        source: Tensor | None,
        compute: Compute,
    ) -> Part:
        """Return a function of all edges, with one value each, for the edges that end in `at`.

        `key` identifies the function and its options. `compute` returns positions `[2, E'']` and
        values for the whole graph. It runs again if `source`, its edge weights, is a new tensor.
        """
        known = self.whole((key, at.edge_set, at.is_reverse), source, compute, is_sorted=False)
        with torch.inference_mode(False), torch.no_grad():
            edges, values = _cut(known, at.chunk)
            return Part(weight, self.keep(edges), values, known)

    def whole(
        self, key: Hashable, source: Tensor | None, compute: Compute, *, is_sorted: bool
    ) -> WholeEdges:
        """Return what `compute` returns for the whole graph; `is_sorted`: by target, as given."""
        known = self._known.get(key)
        if known is not None and known.source is source:
            return known
        with torch.inference_mode(False), torch.no_grad():
            edges, values = compute()
            if not is_sorted:
                order = edges[1].argsort(stable=True)
                edges, values = edges[:, order], None if values is None else values[order]
            edges, values = self.plan.localize(edges, values)
            if known is not None and is_sorted:
                pattern = known.pattern
            else:
                owners = self.plan.chunk_of_row()
                pattern = Pattern(edges, self.plan.num_rows, owners, self.keep)
            if values is not None and values is not source:
                values = self.keep(values)
        made = self._known[key] = WholeEdges(source, pattern, values)
        return made

    def adjacency(self, known: WholeEdges, *, is_mean: bool) -> Adjacency:
        """Return the edges as a matrix; `is_mean` divides by the degrees of targets."""
        if is_mean not in known.adjacencies:
            known.adjacencies[is_mean] = Adjacency(known.pattern, known.values, is_mean=is_mean)
        return known.adjacencies[is_mean]


def _cut(known: WholeEdges, chunk: Chunk) -> tuple[Tensor, Tensor]:
    assert known.values is not None
    starts = known.pattern.starts[chunk.start : chunk.end + 1]
    first, last = int(starts[0]), int(starts[-1])
    source = known.pattern.sources[first:last].long()
    target = torch.arange(chunk.num_nodes, device=source.device).repeat_interleave(starts.diff())
    is_own = (source >= chunk.start) & (source < chunk.end)
    in_halo = torch.searchsorted(chunk.halo, source) + chunk.num_nodes
    local = torch.where(is_own, source - chunk.start, in_halo)
    return torch.stack([local, target]), known.values[first:last]
