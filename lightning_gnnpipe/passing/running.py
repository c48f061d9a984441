"""What the running layer is, and what a chunk read, noted for recomputation in backward.

A batch may hold several edge sets over the same nodes, and a layer may be given each of them, or
reversed edges. A chunk has the same halo for all of its edge sets, so that its local numbers mean
the same in each. Reversed edges have a halo of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.passing.interfaces import EdgeLeaves
from lightning_gnnpipe.types import ChunkView, PlanView


class Tape:
    """The reads of one run of some layers over one chunk: recorded once, then played back.

    Attributes:
        is_replay: Whether the layers run for the second time.
        stale: For each read of halo rows the chunks whose rows were stale.
    """

    def __init__(self) -> None:
        self.is_replay = False
        self.stale: dict[Hashable, Collection[int]] = {}


_layer: ContextVar[RunningChunk | None] = ContextVar("layer", default=None)  # of this thread


@dataclass(slots=True)
class Scope:
    """One segment's run over one chunk.

    Attributes:
        chunk: The chunk; in a layer on reversed edges, the same nodes with the edges that start in
            them.
        segment: The number of the segment.
        leaves: By id, leaves of the batch: their names, and how often they had been written to.
        edge_set: The edge set that the running layer reads; None while it is not known which of
            several, and `chunk` has the edges of all.
        is_reverse: Whether messages flow against the edges of the batch.
    """

    chunk: ChunkView
    segment: int
    leaves: dict[int, tuple[str, int]]
    edge_set: int | None
    is_reverse: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    widened: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)


class RunningChunk:
    """The chunk and the segment that are running now.

    Args:
        plan: The graph's chunks.
    """

    def __init__(self, plan: PlanView) -> None:
        self.leaves: EdgeLeaves | None = None  # of the batch, for the time of a pass
        self._plan = plan
        self._scope: Scope | None = None
        self._flips: dict[tuple[int, str, int], int | None] = {}
        self._num_numbered: dict[int | None, int] = {}

    def enter(
        self, chunk: ChunkView, segment: int, leaves: Mapping[str, Tensor] | None = None
    ) -> None:
        """Say that `segment` runs over `chunk` from now on, on the chunk's parts of `leaves`."""
        names = {id(tensor): (name, version_of(tensor)) for name, tensor in (leaves or {}).items()}
        self._scope = Scope(chunk, segment, names, 0 if self._plan.num_edge_sets == 1 else None)

    def leave(self) -> None:
        """Forget the running chunk and the tensors it widened."""
        self._scope = None

    @property
    def chunk(self) -> ChunkView:
        """The chunk that is running, with the edges that the running layer reads."""
        return self._running.chunk

    @property
    def edges_key(self) -> tuple[int | None, bool]:
        """Names the edges that the running layer reads: which set, and whether they are reversed.

        The set is None while it is not known which of several.
        """
        return self._running.edge_set, self._running.is_reverse

    @property
    def plan(self) -> PlanView:
        """The chunks, with the edges that the running layer reads."""
        return self._plan_of(*self.edges_key)

    @property
    def whole(self) -> ChunkView:
        """The whole graph as one chunk, with the edges that the running layer reads.

        It is that of all shards, where the graph is split.
        """
        return self.plan.globe.whole.chunks[0]

    @property
    def perm(self) -> Tensor:
        """`[num_nodes]` the node at each position of this shard."""
        return self._plan.perm

    @property
    def num_numbered(self) -> int:
        """How many nodes PyG finds in a graph where it is given the edges only."""
        edge_set = self._running.edge_set
        if edge_set not in self._num_numbered:
            nodes = self._plan.globe.perm[self.whole.edge_index]
            self._num_numbered[edge_set] = int(nodes.max()) + 1 if nodes.numel() else 0
        return self._num_numbered[edge_set]

    @property
    def is_whole(self) -> bool:
        """Whether the whole graph, or all of this shard, is running as one chunk."""
        return self.chunk.is_whole

    @property
    def sees_all(self) -> bool:
        """Whether the whole graph is running as one chunk, on this rank alone."""
        return self.is_whole and self._plan.globe is self._plan

    def next_call(self, layer: str) -> int:
        """Number the calls of `layer` within the running segment and chunk, from 0."""
        call = self._running.calls.get(layer, 0)
        self._running.calls[layer] = call + 1
        return call

    def find_edges(self, edges: Any) -> int | None:
        """Return the edge set of which `edges` are the chunk's, in the running direction, or None.

        None as well if the edge set that is running is another.
        """
        scope = self._running
        if scope.edge_set is not None:
            return scope.edge_set if edges is scope.chunk.edge_index else None
        numbers = range(self._plan.num_edge_sets)
        return next(
            (i for i in numbers if edges is self._chunk_of(i, scope.is_reverse).edge_index), None
        )

    def find_flip(self, layer: str, edges: Tensor) -> int | None:
        """Return the edge set of which `edges`, given to `layer`, are the chunk's, rows swapped.

        Decided where the whole graph is one chunk: a chunk with few edges cannot tell.
        """
        scope = self._running
        key = (scope.segment, layer, self.next_call(f"edges of {layer}"))
        numbers = range(self._plan.num_edge_sets)
        if key not in self._flips or self.is_whole:
            found = (i for i in numbers if self._is_flip_of(edges, i))
            self._flips[key] = next(found, None)
        known = self._flips[key]
        return known if known is not None and self._is_flip_of(edges, known) else None

    @contextmanager
    def in_layer(self) -> Iterator[None]:
        """Say that a layer runs in this thread within the block; see `InLayer`."""
        token = _layer.set(self)
        try:
            yield
        finally:
            _layer.reset(token)

    @contextmanager
    def directed(self, edge_set: int, is_reverse: bool) -> Iterator[Tensor]:
        """Have messages flow along the edges of one set, or against them, within the block.

        Yields:
            `[2, num_edges]` the edges that end in the chunk, in that direction.
        """
        before = self._running
        self._scope = replace(
            before,
            chunk=self._chunk_of(edge_set, is_reverse),
            leaves=dict(before.leaves),
            edge_set=edge_set,
            is_reverse=is_reverse,
        )
        try:
            yield self._scope.chunk.edge_index
        finally:
            self._scope = before

    @contextmanager
    def along(self, edges: Tensor) -> Iterator[None]:
        """Have the running layer read the edge set that `edges` are of, within the block.

        Nothing changes if they are of none, or of the one that it reads anyway.
        """
        found = self.find_edges(edges)
        if found is None or found == self._running.edge_set:
            yield
            return
        with self.directed(found, is_reverse=False):
            yield

    def reversed_leaf(self, tensor: Tensor) -> Tensor | None:
        """Return the part of the edge-level leaf behind `tensor` that fits the reversed chunk.

        None if there is no such leaf.
        """
        whole = self.whole_leaf(tensor)
        if whole is None:
            return None
        scope, first = self._running, self.plan.first_slot
        part = whole[first + scope.chunk.edge_start : first + scope.chunk.edge_end]
        scope.leaves[id(part)] = scope.leaves[id(tensor)][0], version_of(part)
        return part

    def whole_leaf(self, tensor: Tensor) -> Tensor | None:
        """Return the edge-level leaf that `tensor` is the chunk's part of; None if it is of none.

        `[num_edges_of_graph, *]`, in the order of `whole.edge_index`.
        """
        name = self.leaf_name(tensor)
        if name is None or self.leaves is None:
            return None
        edge_set, is_reverse = self.edges_key
        return self.leaves.whole_edge_leaf(name, edge_set=edge_set, reverse=is_reverse)

    def leaf_name(self, tensor: Tensor) -> str | None:
        """Return the name of the leaf that `tensor` is the chunk's part of, unless written to."""
        name, version = self._running.leaves.get(id(tensor), (None, 0))
        return name if version == version_of(tensor) >= 0 else None

    @property
    def _running(self) -> Scope:
        assert self._scope is not None, "a layer ran outside of the pipeline"
        return self._scope

    def _plan_of(self, edge_set: int | None, is_reverse: bool) -> PlanView:
        plan = self._plan.reverse if is_reverse else self._plan
        return plan if edge_set is None else plan.edge_set(edge_set)

    def _chunk_of(self, edge_set: int, is_reverse: bool) -> ChunkView:
        """Return the running chunk with the edges of one set."""
        scope = self._running
        if (edge_set, is_reverse) == (scope.edge_set, scope.is_reverse):
            return scope.chunk
        plan = self._plan_of(edge_set, is_reverse)
        return plan.whole.chunks[0] if self.is_whole else plan.chunks[scope.chunk.index]

    def _is_flip_of(self, edges: Tensor, edge_set: int) -> bool:
        other = self._chunk_of(edge_set, self._running.is_reverse).edge_index
        return edges.shape == other.shape and bool(
            (edges[0] == other[1]).all() and (edges[1] == other[0]).all()
        )


@dataclass(frozen=True, slots=True)
class InLayer:
    """A function put in the place of a global one, for the layers that run on chunks alone.

    All others, in hooks of these layers or in other threads, get the one that was there.

    Attributes:
        context: That the layers run in.
        local: The function for them.
        original: The one that was there.
    """

    context: RunningChunk
    local: Callable[..., Any]
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.local if _layer.get() is self.context else self.original
        return function(*args, **kwargs)


def replaces(found: object, function: Callable[..., Any]) -> bool:
    """Whether `found` is `function`, or stands in its place."""
    while isinstance(found, InLayer):
        found = found.original
    return found is function
