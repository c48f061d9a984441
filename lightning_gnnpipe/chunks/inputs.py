"""The tensors of the batch in plan order, so that each chunk is a slice.

They are permuted once, and the copy is cached while the user's batch holds the same tensor.
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
    """The inputs of a pass by chunk of one graph, or by micro-batch."""

    def slice(self, chunk: Any, names: Iterable[str]) -> dict[str, Any]:
        """Return the chunk's part of each leaf in `names`."""

    def num_rows(self, chunk: Any, value: Value) -> int:
        """Return the rows in `chunk` of a tensor like `value`."""

    def num_places(self, value: Value) -> int:
        """Return the rows in all chunks of a tensor like `value`."""

    def places(self, chunk: Any, value: Value) -> Tensor:
        """Return the indices of the rows of `chunk`, `[num_rows]`, in the user's order."""

    def add_grads(self, chunk: Any, leaves: dict[str, Any]) -> None:
        """Add the gradients of a chunk's leaves to the gradients of the whole leaves."""

    def take_grad(self, slot: int) -> Tensor:
        """Return the gradient of leaf number `slot`; zeros if this stage does not read it."""

    def whole_edge_leaf(self, name: str, *, edge_set: int | None, reverse: bool) -> Tensor | None:
        """Return an edge-level leaf of the whole graph; see `passing.EdgeLeaves`."""

    def release(self) -> None:
        """Drop the call and its gradients."""


@dataclass(slots=True)
class _Cached:
    number: int | None
    permuted: Tensor


class PlannedInputs:
    """The leaves of a call in the order of a plan; see `PassInputs`."""

    def __init__(self, plan: ChunkPlan) -> None:
        self._plan = plan
        self._cache: dict[str, _Cached] = {}
        self._call: Call | None = None
        self._numbers: Sequence[int | None] = ()
        self._kinds: tuple[Kind, ...] = ()
        self._sets: tuple[int, ...] = ()
        self._grads: dict[str, Tensor] = {}

    def load(self, call: Call, inputs: Inputs, numbers: Sequence[int | None] = ()) -> None:
        """Use the tensors of `call` in the coming pass.

        The permuted copy of a tensor is reused while its number stays the same and is not None.
        """
        self._numbers = numbers or (None,) * len(call.leaves)
        self._cache = {n: one for n, one in self._cache.items() if one.number is not None}
        self._call, self._kinds, self._sets = call, inputs.kinds, inputs.edge_sets
        self._grads.clear()

    def release(self) -> None:
        """Drop the call and its gradients; the permuted copies stay."""
        self._call = None
        self._grads.clear()

    def slice(self, chunk: Chunk, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._slice(chunk, name) for name in names}

    def whole_edge_leaf(self, name: str, *, edge_set: int | None, reverse: bool) -> Tensor | None:
        """Return a leaf of the edges of all shards; see `passing.EdgeLeaves`."""
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
        """Return first and last + 1 slot of the edges of a set that end in `chunk`."""
        part = self._edges(chunk, edge_set)[1]
        return part.edge_start, part.edge_end

    def num_rows(self, chunk: Chunk, value: Value) -> int:
        if value.kind is not Kind.EDGE:
            return chunk.num_nodes
        first, end = self.edge_bounds(chunk, value.edge_set)
        return end - first

    def num_places(self, value: Value) -> int:
        """Return the nodes of all shards: outputs have one row per node."""
        return self._plan.globe.num_nodes

    def places(self, chunk: Chunk, value: Value) -> Tensor:
        """Return the nodes of `chunk`, `[num_rows]`: outputs have one row per node."""
        return self._plan.perm[chunk.start : chunk.end]

    def add_grads(self, chunk: Chunk, leaves: dict[str, Tensor]) -> None:
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
