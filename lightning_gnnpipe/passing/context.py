"""What an intercepted layer knows while it runs: its chunk, and where other chunks' rows are.

In goes a tensor with one row for each node of the chunk; out comes the same tensor widened by the
chunk's halo rows. The context keys every such read by (segment, layer, call, argument), so that a
layer that passes messages several times in one forward pass has a history for each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing.aggregate import Aggregation
from lightning_gnnpipe.passing.interfaces import CallKey, EdgeLeaves, HaloStore
from lightning_gnnpipe.passing.pushpull import PushPull
from lightning_gnnpipe.passing.tape import Tape
from lightning_gnnpipe.passing.whole import EdgeFunctions
from lightning_gnnpipe.types import ChunkView, PlanView, version_of


@dataclass(slots=True)
class _Scope:
    """One segment's run over one chunk.

    Attributes:
        chunk: The chunk; in a layer on reversed edges, the same nodes with the edges that start in
            them.
        segment: The number of the segment.
        leaves: By id, leaves of the batch: their names, and how often they had been written to.
        is_reverse: Whether messages flow against the edges of the batch.
    """

    chunk: ChunkView
    segment: int
    leaves: dict[int, tuple[str, int]]
    is_reverse: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    widened: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)


class MessageContext:
    """The chunk and the segment that are running now, and the store behind them.

    Args:
        store: Histories, or None where the whole graph is one chunk and nothing is to be remembered
            (inference).
        plan: The graph's chunks.
        functions: Normalised edges and the like of other contexts over the same chunks, to share.
    """

    def __init__(
        self, store: HaloStore | None, plan: PlanView, functions: EdgeFunctions | None = None
    ) -> None:
        self.store = store
        self.functions = EdgeFunctions(plan) if functions is None else functions
        self.leaves: EdgeLeaves | None = None  # of the batch, for the time of a pass
        self.tape: Tape | None = None  # while activations may be computed again in backward
        self.dtypes: dict[CallKey, torch.dtype] = {}  # of norms' results on the whole graph
        self.is_refresh = False  # an exact pass for the histories alone
        self.is_passing = False  # inside of `propagate` or `edge_updater`
        self._plan = plan
        self._scope: _Scope | None = None
        self._flips: dict[tuple[int, str, int], bool] = {}

    def enter(
        self, chunk: ChunkView, segment: int, leaves: Mapping[str, Tensor] | None = None
    ) -> None:
        """Say that `segment` runs over `chunk` from now on, on the chunk's parts of `leaves`."""
        names = {id(tensor): (name, version_of(tensor)) for name, tensor in (leaves or {}).items()}
        self._scope = _Scope(chunk, segment, names)

    def leave(self) -> None:
        """Forget the running chunk and the tensors it widened."""
        self._scope = None

    @property
    def chunk(self) -> ChunkView:
        """The chunk that is running, with the edges that the running layer reads."""
        return self._running.chunk

    @property
    def is_reverse(self) -> bool:
        """Whether messages flow against the edges of the batch."""
        return self._running.is_reverse

    @property
    def whole(self) -> ChunkView:
        """The whole graph as one chunk, with the edges that the running layer reads."""
        plan = self._plan.reverse if self.is_reverse else self._plan
        return plan.whole.chunks[0]

    @property
    def perm(self) -> Tensor:
        """`[num_nodes_of_graph]` the node at each position."""
        return self._plan.perm

    @cached_property
    def num_numbered(self) -> int:
        """How many nodes PyG finds in a graph where it is given the edges only."""
        edges = self._plan.whole.chunks[0].edge_index
        return int(self.perm[edges].max()) + 1 if edges.numel() else 0

    def covers(self, chunk: ChunkView) -> bool:
        """Whether `chunk` is the whole graph."""
        return chunk.num_nodes == self._plan.num_nodes

    @contextmanager
    def taped(self, tape: Tape) -> Iterator[None]:
        """Record what layers read of other chunks within the block, or play it back."""
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None

    @property
    def is_replay(self) -> bool:
        """Whether activations are computed a second time, for backward."""
        return self.tape is not None and self.tape.is_replay

    @property
    def is_whole(self) -> bool:
        """Whether the whole graph is running as one chunk."""
        return self.covers(self.chunk)

    @property
    def _running(self) -> _Scope:
        assert self._scope is not None, "a layer ran outside of the pipeline"
        return self._scope

    def next_call(self, layer: str) -> int:
        """Number the calls of `layer` within the running segment and chunk, from 0."""
        call = self._running.calls.get(layer, 0)
        self._running.calls[layer] = call + 1
        return call

    def next_key(self, layer: str) -> CallKey:
        """Name the next call of a layer with statistics over all nodes."""
        call = self.next_call(f"statistics of {layer}")
        return CallKey(self._running.segment, layer, call, "statistics")

    def is_flip(self, layer: str, edges: Tensor) -> bool:
        """Whether `edges`, given to `layer`, are the chunk's edges with their rows swapped.

        Decided where the whole graph is one chunk: a chunk with few edges cannot tell.
        """
        scope = self._running
        key = (scope.segment, layer, self.next_call(f"edges of {layer}"))
        known = self._flips.get(key)
        if known is None or self.is_whole:
            known = self._flips[key] = _swaps(edges, scope.chunk.edge_index)
        return known and _swaps(edges, scope.chunk.edge_index)

    @contextmanager
    def directed(self, is_reverse: bool) -> Iterator[Tensor]:
        """Have messages flow along the edges of the batch, or against them, within the block.

        Yields:
            `[2, num_edges]` the edges that end in the chunk, in that direction.
        """
        before = self._running
        chunk = before.chunk
        if is_reverse:
            reverse = self._plan.reverse
            chunk = reverse.whole.chunks[0] if self.is_whole else reverse.chunks[chunk.index]
        leaves = dict(before.leaves)
        self._scope = replace(before, chunk=chunk, leaves=leaves, is_reverse=is_reverse)
        try:
            yield chunk.edge_index
        finally:
            self._scope = before

    def reversed_leaf(self, tensor: Tensor) -> Tensor | None:
        """Return the part of the edge-level leaf behind `tensor` that fits the reversed chunk.

        None if there is no such leaf.
        """
        whole = self.whole_leaf(tensor)
        if whole is None:
            return None
        scope = self._running
        part = whole[scope.chunk.edge_start : scope.chunk.edge_end]
        scope.leaves[id(part)] = scope.leaves[id(tensor)][0], version_of(part)
        return part

    def whole_leaf(self, tensor: Tensor) -> Tensor | None:
        """Return the edge-level leaf that `tensor` is the chunk's part of; None if it is of none.

        `[num_edges_of_graph, *]`, in the order of `whole.edge_index`.
        """
        name = self.leaf_name(tensor)
        if name is None or self.leaves is None:
            return None
        return self.leaves.whole_edge_leaf(name, reverse=self._running.is_reverse)

    def leaf_name(self, tensor: Tensor) -> str | None:
        """Return the name of the leaf that `tensor` is the chunk's part of, unless written to."""
        name, version = self._running.leaves.get(id(tensor), (None, 0))
        return name if version == version_of(tensor) >= 0 else None

    def aggregation(
        self, key: tuple[str, int, str], edges: Tensor, weight: Tensor | None, *, is_mean: bool
    ) -> Aggregation | None:
        """Return how to aggregate over `edges` without copies of the halo.

        Args:
            key: (layer, call, argument).
            edges: `[2, num_edges]` as given to `propagate`.
            weight: Their factors, `[num_edges]`, or None for ones.
            is_mean: Whether sums are divided by the number of messages.

        Returns:
            None unless edges and weights are the batch's own, or a function of them, and the
            history can be read in place.
        """
        scope = self._running
        if self.store is not None and not self.store.is_local and not self.is_whole:
            return None
        adjacency = self.functions.adjacency(edges, weight, is_mean=is_mean)
        if adjacency is None and edges is scope.chunk.edge_index:
            leaf = None if weight is None else self.whole_leaf(weight)
            if weight is None or (leaf is not None and leaf.dim() == 1):
                name = None if weight is None else self.leaf_name(weight)
                adjacency = self.functions.batch_adjacency(
                    (name, scope.is_reverse), self.whole.edge_index, leaf, is_mean=is_mean
                )
        if adjacency is None:
            return None
        full_key = CallKey(scope.segment, *key)
        return Aggregation(adjacency, scope.chunk, self.store, full_key, self.is_whole, self.tape)

    def widen(self, layer: str, call: int, argument: str, rows: Tensor, dim: int = 0) -> Tensor:
        """Return `rows` with the halo's behind the chunk's in dimension `dim`.

        A tensor that is widened twice in one segment (attention weights, then messages) is widened
        once.

        Raises:
            UnsupportedError: If `rows` does not have one row a node of the chunk.
        """
        scope = self._running
        memo = (id(rows), version_of(rows), scope.is_reverse)
        if version_of(rows) >= 0 and memo in scope.widened:
            return scope.widened[memo][1]
        if not -rows.dim() <= dim < rows.dim() or rows.size(dim) != scope.chunk.num_nodes:
            raise UnsupportedError(
                explain(
                    expected=f"argument '{argument}' of layer '{layer}' to have one row a node in "
                    f"dimension {dim}",
                    found=f"shape {list(rows.shape)} for {scope.chunk.num_nodes} nodes",
                    remedy="Bipartite inputs and static graphs with a batch dimension are not "
                    "pipelined.",
                )
            )
        if self.store is None:
            wide = rows
        else:
            key = CallKey(scope.segment, layer, call, argument)
            first = rows.movedim(dim, 0)
            wide = cast(Any, PushPull).apply(first, self.store, key, scope.chunk, self.tape)
            wide = wide.movedim(0, dim)
        scope.widened[memo] = (rows, wide)
        return wide


def _swaps(edges: Tensor, other: Tensor) -> bool:
    """Whether two `[2, num_edges]` tensors are each other's with their rows swapped."""
    return edges.shape == other.shape and bool(
        (edges[0] == other[1]).all() and (edges[1] == other[0]).all()
    )
