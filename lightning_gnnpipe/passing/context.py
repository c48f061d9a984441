"""Context of intercepted layers: the running chunk, its edges, and the store of histories.

What a layer needs on a chunk is found when it first runs there, and looked up in later steps: the
edges of its set and direction (`LocalEdges`), and the matrix of its weighted sum (`BoundSum`) or,
with PyG's messages, the halo rows of each argument (`BoundHalo`). Each look-up compares what the
layer is given with the first time.

Each chunk has one halo for all of its edge sets, so local indices mean the same in each. Reversed
edges have a halo of their own. Each call of a layer has a history of its own, see `CallKey`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing.aggregate import (
    ROWS,
    BoundHalo,
    BoundSum,
    CallKey,
    Exchange,
    LinearRule,
)
from lightning_gnnpipe.passing.edges import WHOLE, GraphEdges, LocalEdges
from lightning_gnnpipe.passing.masks import Masks
from lightning_gnnpipe.passing.matrix import RUNNING, Entries
from lightning_gnnpipe.staleness import HistoryStore

# An instance, Python module or namespace, and attributes to set.
Replacement = tuple[object, Mapping[str, Any]]

_layer: ContextVar[MessageContext | None] = ContextVar("layer", default=None)  # per thread
_OUTSIDE = cast(LocalEdges, None)  # no layer of the pipeline runs


class MessageContext:
    """What a layer sees while it runs on a chunk.

    Attributes:
        at: The running chunk, with the running layer's edges.
        segment: The running segment.
        is_replay: Whether a layer runs again for backward; None if it keeps its activations.
    """

    def __init__(
        self, store: HistoryStore | None, plan: ChunkPlan, edges: GraphEdges | None = None
    ) -> None:
        self.store = store  # None for whole-graph inference, or without cross-chunk edges
        self.edges = GraphEdges(plan, lambda tensor: tensor) if edges is None else edges
        self.leaves: Any = None  # `chunks.PassInputs` of the batch, set during a pass
        self.dtypes: dict[Hashable, torch.dtype] = {}  # output dtypes of norms on the whole graph
        # Mean and variance of all rows with their autograd graph, if kept: see `selfcheck`.
        self.live: dict[Hashable, tuple[Tensor, Tensor]] | None = None
        self.replaced: Collection[str] = ()  # norms whose running statistics this pass replaces
        self.is_refresh = False  # in an exact pass that only refreshes histories
        self.masks: Masks | None = None  # of dropout, if they are drawn ahead in this pass
        self.is_passing = False  # inside `propagate` or `edge_updater`
        # Whether layers may be given other edges than all edges of the chunk.
        self.chooses_edges = self.edges.are_several
        self._chunks: dict[tuple[int, bool], LocalEdges] = {}
        self._sums: dict[Hashable, BoundSum] = {}
        self._halos: dict[Hashable, BoundHalo] = {}
        self.exchange: Callable[..., Tensor] = cast(Any, Exchange).apply  # of `widen`
        self.at, self.segment = _OUTSIDE, 0
        self.is_replay: bool | None = None
        # Of one run of a segment over a chunk:
        self._leaves: dict[int, tuple[str, int]] = {}  # by tensor id: leaf, version of the tensor
        self.calls = defaultdict[str, Iterator[int]](count)  # of each layer
        self._widened: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}
        self._matrices: dict[int, tuple[Any, Entries]] = {}  # by id, of layers

    def enter(self, chunk: Chunk, segment: int, leaves: Mapping[str, Tensor] | None = None) -> None:
        """Start `segment` on `chunk`, with the chunk's parts of the batch's leaves."""
        key = chunk.index, chunk.is_whole
        if key not in self._chunks:
            self._chunks[key] = self.edges.on(chunk)
        self.at, self.segment = self._chunks[key], segment
        self._leaves, self._widened, self._matrices = {}, {}, {}
        self.calls = defaultdict(count)
        if leaves:
            for name, tensor in leaves.items():
                self._leaves[id(tensor)] = name, version_of(tensor)
        RUNNING.set(self)

    def leave(self) -> None:
        """Forget the running chunk and the tensors that it widened."""
        self.at = _OUTSIDE
        self._leaves, self._widened, self._matrices = {}, {}, {}
        RUNNING.set(None)

    @property
    def is_whole(self) -> bool:
        """Whether the running chunk is the whole graph, or the whole shard."""
        return self.at.place == WHOLE

    @property
    def sees_all(self) -> bool:
        """Whether the running chunk is the whole graph, on this rank alone."""
        return self.at.place == WHOLE and self.edges.sees_all

    @property
    def is_plain(self) -> bool:
        """Whether the whole graph runs as one chunk without histories."""
        return self.store is None and self.at.place == WHOLE

    def in_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` such that this thread is marked as running a layer; see `InLayer`."""

        @wraps(run)
        def run_in_layer(*args: Any, **kwargs: Any) -> Any:
            token = _layer.set(self)
            try:
                return run(*args, **kwargs)
            finally:
                _layer.reset(token)

        return run_in_layer

    def next_key(self, layer: str) -> CallKey:
        """Return the key for the next statistics of `layer` over all nodes."""
        call = next(self.calls[f"statistics of {layer}"])
        return CallKey(self.segment, layer, call, "statistics")

    def find(self, edges: Any) -> LocalEdges | None:
        """Return the local edges of the chunk that `edges` is; None for any other object."""
        found = self.edges.by_tensor.get(id(edges))
        return found if found is not None and found.place == self.at.place else None

    def turn(self, edges: Tensor) -> Tensor:
        """Return edges with swapped rows; for the chunk's edges, those that start in its nodes."""
        found = None if self.is_plain else self.find(edges)
        if found is None or found.is_reverse:
            return edges.flip(0)
        self.chooses_edges = True
        return self.edges.at(found.place, found.edge_set, is_reverse=True).chunk.edge_index

    @contextmanager
    def directed(self, edge_set: int | None, is_reverse: bool) -> Iterator[Tensor]:
        """Switch to one edge set, maybe reversed, within the block; yield `[2, num_edges]`."""
        before = self.at
        self.at = self.edges.at(before.place, edge_set, is_reverse=is_reverse)
        try:
            yield self.at.chunk.edge_index
        finally:
            self.at = before

    def along(self, edges: Any) -> AbstractContextManager[Any]:
        """Switch to the edge set of `edges`, if there is one, within the block."""
        found = self.find(edges)
        if found is None or found is self.at:
            return nullcontext()
        return self.directed(found.edge_set, found.is_reverse)

    def whole_leaf(self, tensor: Tensor | None) -> Tensor | None:
        """Return the edge-level leaf of `tensor`, in the order of the whole's edges, or None."""
        name = self.leaf_name(tensor)
        if name is None or self.leaves is None or self.at.is_reverse:
            return None
        return self.leaves.whole_edge_leaf(name, edge_set=self.at.edge_set)

    def leaf_name(self, tensor: Tensor | None) -> str | None:
        """Return the name of the leaf of `tensor`; None if there is none, or it was modified."""
        name, version = self._leaves.get(id(tensor), (None, 0))
        return name if tensor is not None and version == version_of(tensor) >= 0 else None

    def prepare(self) -> None:
        """Update the tensors that CUDA graphs read to this step's order of chunks."""
        assert self.store is not None
        self.store.prepare()
        for adjacency in {one.adjacency for one in self._sums.values()}:
            adjacency.refresh(self.store.order)

    def weighted_sum(
        self, layer: str, call: int, rule: LinearRule, edges: Any, rows: Any, weight: Tensor | None
    ) -> Tensor | None:
        """Return sums of source rows times `weight`, `[num_edges]`, by one product.

        None if the model computes edges or weights, or if the histories are on another device.
        """
        if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
            return None
        key = self.at.place, self.segment, layer, call
        bound = self._sums.get(key)
        if bound is None or not (
            bound.edges is edges and bound.weight is weight and bound.rule == rule
        ):
            bound = self._bind(CallKey(*key[1:], ROWS), rule, edges, weight)
            if bound is None:
                return None
            self._sums[key] = bound
        if rows.size(0) != bound.chunk.num_nodes:
            return None
        if bound.dtype not in (None, rows.dtype):
            assert bound.dtype is not None
            rows = rows.to(torch.promote_types(rows.dtype, bound.dtype))  # of messages
        summed: Tensor = cast(Any, Exchange).apply(rows, bound, self.is_replay)
        return summed

    def _bind(
        self, key: CallKey, rule: LinearRule, edges: Any, weight: Tensor | None
    ) -> BoundSum | None:
        """Find the matrix of a weighted sum; None if it may change from step to step."""
        own, values = edges, weight  # with one value for each edge
        entries = self.entries_of(edges)
        if entries is not None:
            own = entries.edges
            if rule.multiplies is not None:
                if not rule.multiplies:
                    return None
                drops_values = entries.layout is None and rule.weight is None  # of a SparseTensor
                values = None if drops_values else entries.weight
            elif rule.weight == "edge_weight" and values is None:
                values = entries.weight
        if values is not None and (values.requires_grad or values.dim() != 1):
            return None
        if self.store is not None and not self.store.is_local and not self.is_whole:
            return None
        with self.along(own):
            at, leaf, name = self.at, self.whole_leaf(values), self.leaf_name(values)
        whole = at.owner(own, values)
        is_known = values is None or (leaf is not None and leaf.dim() == 1)
        if whole is None and own is at.chunk.edge_index and is_known:
            source, positions = ("batch", name, at.edge_set, at.is_reverse), at.whole.edge_index
            whole = self.edges.whole(source, leaf, lambda: (positions, leaf), is_sorted=True)
        if whole is None:
            return None
        adjacency = self.edges.adjacency(whole, is_mean=rule.is_mean)
        dtype = None if values is None else values.dtype
        shards = None if self.store is None else self.store.shards
        return BoundSum(rule, edges, weight, dtype, adjacency, at.chunk, self.store, shards, key)

    def as_matrix(self, entries: Entries) -> Any:
        """Return local entries as a layer receives them, `[num_nodes, num_nodes + num_halo]`."""
        chunk, (edges, weight) = self.at.chunk, (entries.edges, entries.weight)
        whole = self.whole_leaf(weight)
        source = weight if whole is None else whole
        known = self.edges.matrices.get(id(edges))
        if known is not None and known[0] is edges and known[1] is source:
            matrix = known[2]
        else:
            layout = entries.layout and torch.sparse_csr
            with torch.inference_mode(False):
                size = chunk.num_nodes, chunk.num_nodes + chunk.num_halo
                matrix = replace(entries, layout=layout).build(*size)
            if weight is None or not weight.requires_grad:
                self.edges.matrices[id(edges)] = edges, source, matrix
        self._matrices[id(matrix)] = matrix, entries
        return matrix

    def entries_of(self, edges: Any) -> Entries | None:
        """Return the entries of a matrix that `as_matrix` returned; None for all else."""
        return self._matrices.get(id(edges), (None, None))[1]

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
        at, store = self.at, self.store
        # Attention widens a tensor twice in a segment: push it once.
        memo = (id(rows), version_of(rows), at.is_reverse)
        if memo[1] >= 0 and memo in self._widened:
            return self._widened[memo][1]
        if not -rows.dim() <= dim < rows.dim() or rows.size(dim) != at.chunk.num_nodes:
            raise UnsupportedError(
                expected=f"argument '{argument}' of layer '{layer}' to have one row per node in "
                f"dimension {dim}",
                found=f"shape {list(rows.shape)} for {at.chunk.num_nodes} nodes",
                remedy="Pass one tensor with a row for each node: bipartite inputs, and "
                "static graphs with a batch dimension, cannot be pipelined.",
            )
        wide = rows
        if store is not None:
            key = at.place, self.segment, layer, call, argument
            bound = self._halos.get(key)
            if bound is None or bound.chunk is not at.chunk:
                bound = BoundHalo(CallKey(*key[1:]), at.chunk, store, is_linear)
                self._halos[key] = bound
            wide = self.exchange(rows.movedim(dim, 0), bound, self.is_replay).movedim(0, dim)
        self._widened[memo] = (rows, wide)
        return wide


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
