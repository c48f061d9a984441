"""The batch's tensors in plan order, cut by chunk without a copy.

Node-level tensors are permuted once so that a chunk's rows are a slice; so are edge-level ones. The
permuted copy is kept as long as the user's batch holds the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.stages import Value


class PassInputs(Protocol):
    """What a pass takes of the batch, piece by piece: chunks of a graph, or micro-batches."""

    def slice(self, chunk: Any, names: Iterable[str]) -> dict[str, Any]:
        """Return the chunk's part of each leaf in `names`."""

    def num_rows(self, chunk: Any, value: Value) -> int:
        """Return the rows that a tensor like `value` has in `chunk`."""

    def num_places(self, value: Value) -> int:
        """Return the rows that a tensor like `value` has in all."""

    def places(self, chunk: Any, value: Value) -> Tensor:
        """Return where the rows of `chunk` belong, `[num_rows]`, in the user's order."""

    def add_grads(self, chunk: Any, leaves: dict[str, Any]) -> None:
        """Add the gradients of a chunk's leaves to those of the whole leaves."""

    def take_grad(self, slot: int) -> Tensor:
        """Return the gradient of leaf number `slot`; zeros where this stage does not read it."""

    def whole_edge_leaf(self, name: str, *, edge_set: int | None, reverse: bool) -> Tensor | None:
        """Return an edge-level leaf of the whole graph; see `passing.EdgeLeaves`."""

    def release(self) -> None:
        """Forget the call."""


@dataclass(slots=True)
class _Cached:
    number: int | None
    permuted: Tensor


class PlannedInputs:
    """The leaves of a call in the order of a plan."""

    def __init__(self, plan: ChunkPlan) -> None:
        self._plan = plan
        self._cache: dict[str, _Cached] = {}
        self._call: Call | None = None
        self._numbers: Sequence[int | None] = ()
        self._kinds: tuple[Kind, ...] = ()
        self._sets: tuple[int, ...] = ()
        self._grads: dict[str, Tensor] = {}

    def load(self, call: Call, inputs: Inputs, numbers: Sequence[int | None] = ()) -> None:
        """Take the tensors of `call` for the coming pass.

        Args:
            call: The call.
            inputs: What its tensors are.
            numbers: Of their contents; a tensor without one is new in each pass.
        """
        self._numbers = numbers or (None,) * len(call.leaves)
        self._cache = {n: one for n, one in self._cache.items() if one.number is not None}
        self._call, self._kinds, self._sets = call, inputs.kinds, inputs.edge_sets
        self._grads.clear()

    def release(self) -> None:
        """Forget the call (the permuted copies stay)."""
        self._call = None
        self._grads.clear()

    def slice(self, chunk: Chunk, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the chunk's part of each leaf in `names`."""
        return {name: self._slice(chunk, name) for name in names}

    def whole_edge_leaf(self, name: str, *, edge_set: int | None, reverse: bool) -> Tensor | None:
        """Return a leaf of the edges of all shards, `[num_edges, *]`, in slots of the graph.

        None if `name` is not of the edges of `edge_set`, or needs a gradient.
        """
        slot = _slot(name)
        leaf = self._leaf(slot)
        if self._kinds[slot] is not Kind.EDGE or leaf.requires_grad:
            return None
        if edge_set is None or self._sets[slot] != edge_set:
            return None
        globe = self._plan.globe
        edges = (globe.reverse if reverse else globe).edge_set(edge_set)
        if reverse:
            name += " reversed"
        if globe is not self._plan:
            name += " of all shards"
        return self._permuted(name, slot, edges.edge_perm)

    def edge_bounds(self, chunk: Chunk, edge_set: int) -> tuple[int, int]:
        """Return the first slot, and that behind the last, of a set's edges that end in `chunk`."""
        part = self._edges(chunk, edge_set)[1]
        return part.edge_start, part.edge_end

    def num_rows(self, chunk: Chunk, value: Value) -> int:
        """Return the rows that a tensor like `value` has in `chunk`."""
        if value.kind is not Kind.EDGE:
            return chunk.num_nodes
        first, end = self.edge_bounds(chunk, value.edge_set)
        return end - first

    def num_places(self, value: Value) -> int:
        """Return the rows that an output has, over all shards."""
        return self._plan.globe.num_nodes

    def places(self, chunk: Chunk, value: Value) -> Tensor:
        """Return the nodes of `chunk`, `[num_rows]`: outputs have one row a node."""
        return self._plan.perm[chunk.start : chunk.end]

    def add_grads(self, chunk: Chunk, leaves: dict[str, Tensor]) -> None:
        """Add the gradients of a chunk's leaves to those of the whole leaves."""
        for name, leaf in leaves.items():
            if leaf.grad is None:
                continue
            slot = _slot(name)
            if name not in self._grads:
                self._grads[name] = torch.zeros_like(self._leaf(slot))
            total = self._grads[name]
            if self._kinds[slot] is Kind.NODE:
                total[self._plan.perm[chunk.start : chunk.end]] += leaf.grad
            elif self._kinds[slot] is Kind.EDGE:
                edges, part = self._edges(chunk, self._sets[slot])
                total[edges.edge_perm[part.edge_start : part.edge_end]] += leaf.grad
            else:
                total += leaf.grad

    def take_grad(self, slot: int) -> Tensor:
        """Return the gradient of leaf number `slot`; zeros where this stage does not read it."""
        grad = self._grads.get(f"leaf_{slot}")
        return torch.zeros_like(self._leaf(slot)) if grad is None else grad

    def _slice(self, chunk: Chunk, name: str) -> Tensor:
        slot = _slot(name)
        kind = self._kinds[slot]
        if kind is Kind.EDGE_INDEX:
            return self._edges(chunk, self._sets[slot])[1].edge_index
        leaf = self._leaf(slot)
        if kind is Kind.WHOLE:
            part = leaf.detach()
        elif kind is Kind.NODE:
            part = self._permuted(name, slot, self._plan.perm)[chunk.start : chunk.end]
        else:
            edges, own = self._edges(chunk, self._sets[slot])
            part = self._permuted(name, slot, edges.edge_perm)[own.edge_start : own.edge_end]
        return part.detach().requires_grad_() if leaf.requires_grad else part

    def _edges(self, chunk: Chunk, edge_set: int) -> tuple[ChunkPlan, Chunk]:
        """Return the plan of an edge set, and the chunk with its edges of that set."""
        edges = self._plan.edge_set(edge_set)
        if edges is self._plan:
            return edges, chunk
        return edges, (edges.whole.chunks[0] if chunk.is_whole else edges.chunks[chunk.index])

    def _permuted(self, name: str, slot: int, order: Tensor) -> Tensor:
        number, leaf = self._numbers[slot], self._leaf(slot)
        cached = self._cache.get(name)
        if cached is None or cached.number != number:
            with torch.inference_mode(False), torch.no_grad():
                cached = self._cache[name] = _Cached(number, leaf.detach()[order])
        return cached.permuted

    def _leaf(self, slot: int) -> Tensor:
        assert self._call is not None
        return self._call.leaves[slot]


def _slot(name: str) -> int:
    return int(name.removeprefix("leaf_"))
