"""Context of intercepted layers: the running chunk, its edges, and the store of halo rows.

Each chunk has one halo for all of its edge sets, so local indices mean the same in each. Reversed
edges have a halo of their own. Each call of a layer has a history of its own, see `CallKey`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing.aggregate import Aggregation, LinearAggregate, PushPull
from lightning_gnnpipe.passing.interfaces import CallKey, EdgeLeaves, HaloStore, Tape
from lightning_gnnpipe.passing.matrix import RUNNING, Entries
from lightning_gnnpipe.passing.whole import EdgeFunctions

# An instance, Python module or namespace, and attributes to set.
Replacement = tuple[object, Mapping[str, Any]]

_layer: ContextVar[MessageContext | None] = ContextVar("layer", default=None)  # per thread


@dataclass(slots=True)
class Scope:
    """One run of a segment over one chunk."""

    chunk: Chunk  # on reversed edges, with the edges that start in its nodes
    segment: int
    leaves: dict[int, tuple[str, int]]  # by tensor id: name of the leaf, version of the tensor
    edge_set: int | None  # None while unknown; `chunk` then has the edges of all sets
    is_reverse: bool = False  # whether messages flow against the batch's edges
    calls: dict[str, int] = field(default_factory=dict)
    widened: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)
    matrices: dict[int, tuple[Any, Entries]] = field(default_factory=dict)  # by id, of layers
    turned: dict[int, tuple[int, Tensor]] = field(default_factory=dict)  # edge sets, see `turn`


_OUTSIDE = cast(Scope, None)  # no layer of the pipeline runs


class TapedContext:
    """A context whose layers may run a second time, for backward."""

    tape: Tape | None = None  # set while reads are recorded or replayed

    @contextmanager
    def taped(self, tape: Tape) -> Iterator[None]:
        """Record halo reads on `tape` within the block, or replay them."""
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None

    @property
    def is_replay(self) -> bool:
        """Whether activations are recomputed for backward."""
        return self.tape is not None and self.tape.is_replay


class MessageContext(TapedContext):
    """The running chunk and segment, and the store of histories."""

    def __init__(
        self, store: HaloStore | None, plan: ChunkPlan, functions: EdgeFunctions | None = None
    ) -> None:
        self.store = store  # None for whole-graph inference, or without cross-chunk edges
        # Contexts over the same chunks share this cache.
        self.functions = EdgeFunctions(plan) if functions is None else functions
        self.leaves: EdgeLeaves | None = None  # of the batch, set during a pass
        self.dtypes: dict[Hashable, torch.dtype] = {}  # output dtypes of norms on the whole graph
        self.replaced: Collection[str] = ()  # norms whose running statistics this pass replaces
        self.is_refresh = False  # in an exact pass that only refreshes histories
        self.is_passing = False  # inside `propagate` or `edge_updater`
        self._plan = plan
        self._scope = _OUTSIDE
        self._num_numbered: dict[int | None, int] = {}

    def enter(self, chunk: Chunk, segment: int, leaves: Mapping[str, Tensor] | None = None) -> None:
        """Start `segment` on `chunk`, with the chunk's parts of the batch's leaves."""
        names = {id(tensor): (name, version_of(tensor)) for name, tensor in (leaves or {}).items()}
        self._scope = Scope(chunk, segment, names, 0 if self._plan.num_edge_sets == 1 else None)
        RUNNING.set(self)

    def leave(self) -> None:
        """Forget the running chunk and the tensors that it widened."""
        self._scope = _OUTSIDE
        RUNNING.set(None)

    @property
    def chunk(self) -> Chunk:
        """The running chunk, with the running layer's edges."""
        return self._scope.chunk

    @property
    def edges_key(self) -> tuple[int | None, bool]:
        """The running layer's edge set (None while unknown), and whether it is reversed."""
        return self._scope.edge_set, self._scope.is_reverse

    @property
    def plan(self) -> ChunkPlan:
        """The plan, with the running layer's edges."""
        return self._plan_of(*self.edges_key)

    @property
    def whole(self) -> Chunk:
        """The whole graph (all shards) as one chunk, with the running layer's edges."""
        return self.plan.globe.whole.chunks[0]

    def are_numbered(self) -> Tensor:
        """Whether PyG counts each of the chunk's nodes: up to the largest index of the edges."""
        edge_set = self._scope.edge_set
        if edge_set not in self._num_numbered:
            nodes = self._plan.globe.perm[self.whole.edge_index]
            self._num_numbered[edge_set] = int(nodes.max()) + 1 if nodes.numel() else 0
        return self._plan.perm[self.chunk.start : self.chunk.end] < self._num_numbered[edge_set]

    @property
    def is_whole(self) -> bool:
        """Whether the running chunk is the whole graph, or the whole shard."""
        return self.chunk.is_whole

    @property
    def sees_all(self) -> bool:
        """Whether the running chunk is the whole graph, on this rank alone."""
        return self.is_whole and self._plan.globe is self._plan

    def next_call(self, layer: str) -> int:
        """Count a call of `layer` in the running segment and chunk; return its index."""
        call = self._scope.calls.get(layer, 0)
        self._scope.calls[layer] = call + 1
        return call

    def find_edges(self, edges: Any) -> tuple[int, bool] | None:
        """Return the edge set whose edges in the chunk are `edges`, and whether they are turned."""
        scope = self._scope
        if id(edges) in scope.turned:
            return scope.turned[id(edges)][0], True
        if scope.edge_set is not None:
            is_own = edges is scope.chunk.edge_index
            return (scope.edge_set, scope.is_reverse) if is_own else None
        numbers = range(self._plan.num_edge_sets)
        found = (i for i in numbers if edges is self._chunk_of(i, scope.is_reverse).edge_index)
        number = next(found, None)
        return None if number is None else (number, scope.is_reverse)

    def turn(self, edges: Tensor) -> Tensor:
        """Return edges with swapped rows; for the chunk's edges, those that start in its nodes."""
        place = None if self.is_plain else self.find_edges(edges)
        if place is None or place[1]:
            return edges.flip(0)
        turned = self._chunk_of(place[0], True).edge_index
        self._scope.turned[id(turned)] = place[0], turned
        return turned

    @contextmanager
    def in_layer(self) -> Iterator[None]:
        """Mark this thread as running a layer within the block; see `InLayer`."""
        token = _layer.set(self)
        try:
            yield
        finally:
            _layer.reset(token)

    @property
    def is_in_layer(self) -> bool:
        """Whether this thread runs a layer, or a norm."""
        return _layer.get() is self

    @contextmanager
    def directed(self, edge_set: int, is_reverse: bool) -> Iterator[Tensor]:
        """Switch to one edge set, maybe reversed, within the block; yield `[2, num_edges]`."""
        before, chunk = self._scope, self._chunk_of(edge_set, is_reverse)
        self._scope = replace(before, chunk=chunk, edge_set=edge_set, is_reverse=is_reverse)
        self._scope.leaves = dict(before.leaves)
        try:
            yield chunk.edge_index
        finally:
            self._scope = before

    def along(self, edges: Tensor) -> AbstractContextManager[Any]:
        """Switch to the edge set of `edges`, if there is one, within the block."""
        found = self.find_edges(edges)
        if found is None or found == (self._scope.edge_set, self._scope.is_reverse):
            return nullcontext()
        return self.directed(*found)

    def whole_leaf(self, tensor: Tensor | None) -> Tensor | None:
        """Return the edge-level leaf of `tensor`, in the order of `whole.edge_index`, or None."""
        name = self.leaf_name(tensor)
        edge_set, is_reverse = self.edges_key
        if name is None or self.leaves is None or is_reverse:
            return None
        return self.leaves.whole_edge_leaf(name, edge_set=edge_set)

    def leaf_name(self, tensor: Tensor | None) -> str | None:
        """Return the name of the leaf of `tensor`; None if there is none, or it was modified."""
        name, version = self._scope.leaves.get(id(tensor), (None, 0))
        return name if tensor is not None and version == version_of(tensor) >= 0 else None

    @property
    def is_plain(self) -> bool:
        """Whether the whole graph runs as one chunk without histories."""
        return self.store is None and self.is_whole

    def next_key(self, layer: str) -> CallKey:
        """Return the key for the next statistics of `layer` over all nodes."""
        call = self.next_call(f"statistics of {layer}")
        return CallKey(self._scope.segment, layer, call, "statistics")

    def weighted_sum(
        self,
        key: tuple[str, int, str],
        edges: Tensor,
        rows: Any,
        weight: Tensor | None,
        *,
        is_mean: bool,
    ) -> Tensor | None:
        """Return sums of source rows times `weight`, `[num_edges]`, by one product.

        None if the model computes edges or weights, or if the histories are on another device.
        """
        scope = self._scope
        if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
            return None
        if rows.size(0) != scope.chunk.num_nodes:
            return None
        if weight is not None:
            if weight.requires_grad or weight.dim() != 1:
                return None
            rows = rows.to(torch.promote_types(rows.dtype, weight.dtype))  # of messages
        if self.store is not None and not self.store.is_local and not self.is_whole:
            return None
        adjacency = self.functions.adjacency(edges, weight, is_mean=is_mean)
        if adjacency is None and edges is scope.chunk.edge_index:
            leaf, batch_key = self.whole_leaf(weight), (self.leaf_name(weight), self.edges_key)
            if weight is None or (leaf is not None and leaf.dim() == 1):
                adjacency = self.functions.batch_adjacency(
                    batch_key, self.whole.edge_index, leaf, is_mean=is_mean
                )
        if adjacency is None:
            return None
        full_key = CallKey(scope.segment, *key)
        call = Aggregation(adjacency, scope.chunk, self.store, full_key, self.is_whole, self.tape)
        return cast(Any, LinearAggregate).apply(rows, call)

    def as_matrix(self, entries: Entries) -> Any:
        """Return local entries as a layer receives them, `[num_nodes, num_nodes + num_halo]`."""
        chunk, (edges, weight) = self.chunk, (entries.edges, entries.weight)
        whole = self.whole_leaf(weight)
        source = weight if whole is None else whole
        known = self.functions.matrices.get(id(edges))
        if known is not None and known[0] is edges and known[1] is source:
            matrix = known[2]
        else:
            layout = entries.layout and torch.sparse_csr
            with torch.inference_mode(False):
                size = chunk.num_nodes, chunk.num_nodes + chunk.num_halo
                matrix = replace(entries, layout=layout).build(*size)
            if weight is None or not weight.requires_grad:
                self.functions.matrices[id(edges)] = edges, source, matrix
        self._scope.matrices[id(matrix)] = matrix, entries
        return matrix

    def entries_of(self, edges: Any) -> Entries | None:
        """Return the entries of a matrix that `as_matrix` returned; None for all else."""
        return self._scope.matrices.get(id(edges), (None, None))[1]

    def widen(
        self,
        layer: str,
        call: int,
        argument: str,
        rows: Tensor,
        dim: int = 0,
        *,
        is_linear: bool = False,
    ) -> Tensor:
        """Append halo rows to `rows` in dimension `dim`; `is_linear`: used in a weighted sum."""
        scope = self._scope
        # Attention widens a tensor twice in a segment: push it once.
        memo = (id(rows), version_of(rows), scope.is_reverse)
        if version_of(rows) >= 0 and memo in scope.widened:
            return scope.widened[memo][1]
        if not -rows.dim() <= dim < rows.dim() or rows.size(dim) != scope.chunk.num_nodes:
            raise UnsupportedError(
                expected=f"argument '{argument}' of layer '{layer}' to have one row per node in "
                f"dimension {dim}",
                found=f"shape {list(rows.shape)} for {scope.chunk.num_nodes} nodes",
                remedy="Pass one tensor with a row for each node: bipartite inputs, and "
                "static graphs with a batch dimension, cannot be pipelined.",
            )
        if self.store is None:
            wide = rows
        else:
            key, first = CallKey(scope.segment, layer, call, argument), rows.movedim(dim, 0)
            wide = self.exchange(first, self.store, key, scope.chunk, is_linear=is_linear)
            wide = wide.movedim(0, dim)
        scope.widened[memo] = (rows, wide)
        return wide

    def exchange(
        self, rows: Tensor, store: HaloStore, key: CallKey, chunk: Chunk, *, is_linear: bool
    ) -> Tensor:
        """Write the chunk's rows to `store`; return them with the halo rows appended."""
        wide: Tensor = cast(Any, PushPull).apply(rows, store, key, chunk, self.tape, is_linear)
        return wide

    def _plan_of(self, edge_set: int | None, is_reverse: bool) -> ChunkPlan:
        plan = self._plan.reverse if is_reverse else self._plan
        return plan if edge_set is None else plan.edge_set(edge_set)

    def _chunk_of(self, edge_set: int, is_reverse: bool) -> Chunk:
        scope = self._scope
        if (edge_set, is_reverse) == (scope.edge_set, scope.is_reverse):
            return scope.chunk
        plan = self._plan_of(edge_set, is_reverse)
        return plan.whole.chunks[0] if self.is_whole else plan.chunks[scope.chunk.index]


@contextmanager
def replace_attributes(owner: object, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of the instance itself, Python module or namespace within the block."""
    own = owner if isinstance(owner, dict) else vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - before.keys():
            own.pop(name, None)
        own.update(before)


def replace_all(replacements: Iterable[Replacement]) -> ExitStack:
    """Replace attributes one owner after the other; return the stack that restores them.

    A generator sees what it has yielded before: `forward` of a layer can be replaced twice.
    """
    with ExitStack() as stack:
        for owner, attributes in replacements:
            stack.enter_context(replace_attributes(owner, attributes))
        return stack.pop_all()


@dataclass(frozen=True, slots=True)
class InLayer:
    """Calls `local` inside layers of `context`; hooks and other threads get `original`."""

    context: MessageContext
    local: Callable[..., Any]
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.local if _layer.get() is self.context else self.original
        return function(*args, **kwargs)


def replaces(found: object, function: Callable[..., Any]) -> bool:
    """Whether `found` is `function`, or its replacement."""
    while isinstance(found, InLayer):
        found = found.original
    return found is function
