"""The inputs of a pass: each chunk's or micro-batch's part of the leaves of the user's call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.calls import Call, GraphRows, Inputs, Kind
from lightning_gnnpipe.graph import BatchPlan, Chunk, ChunkPlan, MicroBatch
from lightning_gnnpipe.stages import NUM_GRAPHS, Value


class PassInputs(ABC):
    """The inputs of a pass by chunk of one graph, or by micro-batch; and their gradients."""

    def __init__(self) -> None:
        self._call: Call | None = None
        self._grads: dict[int, Tensor] = {}
        self._found: dict[tuple[int, bool, Kind, int], Tensor] = {}  # see `_places`

    def slice(self, chunk: Any, names: Iterable[str]) -> dict[str, Any]:
        """Return the chunk's part of each leaf in `names`."""
        return {name: self._slice(chunk, name) for name in names}

    def add_grads(self, chunk: Any, leaves: dict[str, Any]) -> None:
        """Add the gradients of a chunk's leaves to the gradients of the whole leaves."""
        for name, part in leaves.items():
            if isinstance(part, Tensor) and part.grad is not None:
                slot = _slot(name)
                if slot not in self._grads:
                    self._grads[slot] = torch.zeros_like(self._leaf(slot))
                self._add(self._grads[slot], slot, chunk, part.grad)

    def take_grad(self, slot: int) -> Tensor:
        """Return the gradient of leaf number `slot`; zeros if this stage does not read it."""
        grad = self._grads.get(slot)
        return torch.zeros_like(self._leaf(slot)) if grad is None else grad

    @property
    def weights(self) -> Mapping[int, str]:
        """Names of the parameters that are leaves, by the number of the leaf."""
        return {} if self._call is None else self._call.weights

    def weight_grads(self) -> dict[str, Tensor]:
        """Return gradients of leaf parameters."""
        return {n: self._grads[slot] for slot, n in self.weights.items() if slot in self._grads}

    def release(self) -> None:
        """Drop the gradients."""
        self._grads.clear()

    def num_rows(self, chunk: Any, value: Value) -> int:
        """Return the rows in `chunk` of a tensor like `value`."""
        first, end = self.span(chunk, value.kind, value.edge_set)
        return end - first

    def places(self, chunk: Any, value: Value) -> Tensor:
        """Return the indices of the rows of `chunk`, `[num_rows]`, in the user's order."""
        return self._places(chunk, value.kind, value.edge_set)

    def _places(self, chunk: Any, kind: Kind, number: int) -> Tensor:
        key = chunk.index, chunk.is_whole, kind, number
        if key not in self._found:
            first, end = self.span(chunk, kind, number)
            self._found[key] = self._origins(kind, number)[first:end]
        return self._found[key]

    @abstractmethod
    def span(self, chunk: Any, kind: Kind, number: int) -> tuple[int, int]:
        """Return first and last + 1 row of `chunk`, in the order of chunks."""

    @abstractmethod
    def num_places(self, value: Value) -> int:
        """Return the rows in all chunks of a tensor like `value`."""

    def places_of_shard(self, index: int, value: Value) -> Tensor:
        """Return the places of the rows of a shard, in the user's order."""
        raise NotImplementedError

    @abstractmethod
    def _origins(self, kind: Kind, number: int) -> Tensor:
        """Return the user's row at each place in the order of chunks."""

    @abstractmethod
    def _slice(self, chunk: Any, name: str) -> Any: ...

    @abstractmethod
    def _add(self, total: Tensor, slot: int, chunk: Any, grad: Tensor) -> None: ...

    def _leaf(self, slot: int) -> Tensor:
        assert self._call is not None
        return self._call.leaves[slot]


class PlannedInputs(PassInputs):
    """The leaves of a call in the order of a plan, so that each chunk is a slice.

    They are permuted once and sliced once: copies and slices stay while the batch holds the same
    tensors.
    """

    def __init__(self, plan: ChunkPlan) -> None:
        super().__init__()
        self._plan = plan
        self._copies: dict[str, tuple[int | None, Tensor]] = {}  # number of the leaf, permuted
        self._numbers: Sequence[int | None] = ()
        self._kinds: tuple[Kind, ...] = ()
        self._sets: tuple[int, ...] = ()
        self._lasting: dict[str, Any] = {}  # what is sliced once: number, kind and edge set
        self._slices: dict[tuple[int, bool], dict[str, Tensor]] = {}  # by chunk and name

    @property
    def num_bytes(self) -> int:
        """Bytes of the permuted copies; none are made of a graph in order."""
        copies = () if self._plan.is_in_order else self._copies.values()
        return sum(copy.nbytes for _, copy in copies)

    def load(self, call: Call, inputs: Inputs, numbers: Sequence[int | None] = ()) -> None:
        """Use the tensors of `call`; copies are reused while their number stays, if not None."""
        self._numbers = numbers or (None,) * len(call.leaves)
        self._copies = {n: one for n, one in self._copies.items() if one[0] is not None}
        self._call, self._kinds, self._sets = call, inputs.kinds, inputs.edge_sets
        self._grads.clear()
        known = zip(call.leaves, self._numbers, self._kinds, self._sets, strict=True)
        lasting = {
            f"leaf_{slot}": (number, kind, edge_set)
            for slot, (leaf, number, kind, edge_set) in enumerate(known)
            if number is not None and not leaf.requires_grad and kind is not Kind.WHOLE
            if slot not in call.weights  # new rows in each step
        }
        if lasting != self._lasting:
            self._lasting = lasting
            self._slices.clear()

    def slice(self, chunk: Chunk, names: Iterable[str]) -> dict[str, Any]:
        known = self._slices.setdefault((chunk.index, chunk.is_whole), {})
        found = {}
        for name in names:
            found[name] = known[name] if name in known else self._slice(chunk, name)
            if name in self._lasting:
                known[name] = found[name]
        return found

    def release(self) -> None:
        """Drop the call and its gradients; the permuted copies stay."""
        super().release()
        self._call = None

    def whole_edge_leaf(self, name: str, *, edge_set: int | None) -> Tensor | None:
        """Return leaf `name` of the edges of all shards, in the edge order of the plan.

        None if the leaf belongs to another edge set, or needs a gradient.
        """
        slot = _slot(name)
        leaf = self._leaf(slot)
        if self._kinds[slot] is not Kind.EDGE or leaf.requires_grad:
            return None
        if edge_set is None or self._sets[slot] != edge_set:
            return None
        globe = self._plan.globe
        if globe is not self._plan:
            name += " of all shards"
        return self._permuted(name, slot, lambda: globe.edge_set(edge_set).edge_perm)

    def span(self, chunk: Chunk, kind: Kind, number: int) -> tuple[int, int]:
        if kind is not Kind.EDGE:
            return chunk.start, chunk.end
        own = self._with_edges(chunk, number)
        return own.edge_start, own.edge_end

    def _origins(self, kind: Kind, number: int) -> Tensor:
        return self._plan.edge_set(number).edge_perm if kind is Kind.EDGE else self._plan.perm

    def num_places(self, value: Value) -> int:
        """Return the nodes, or the edges of a set, of all shards."""
        globe, is_edge = self._plan.globe, value.kind is Kind.EDGE
        return globe.edge_set(value.edge_set).num_edges if is_edge else globe.num_nodes

    def places_of_shard(self, index: int, value: Value) -> Tensor:
        """Return the nodes of a shard, or its edges of a set, in the order of its rows."""
        shard = self._plan.shard
        assert shard is not None
        if value.kind is not Kind.EDGE:
            return shard.nodes(index)
        edges = shard.globe.edge_set(value.edge_set)
        pieces = edges.chunks[index * shard.num_chunks : (index + 1) * shard.num_chunks]
        return edges.edge_perm[pieces[0].edge_start : pieces[-1].edge_end]

    def _add(self, total: Tensor, slot: int, chunk: Chunk, grad: Tensor) -> None:
        if self._kinds[slot] is Kind.WHOLE:
            total += grad
        else:
            total[self._places(chunk, self._kinds[slot], self._sets[slot])] += grad

    def _slice(self, chunk: Chunk, name: str) -> Tensor:
        slot = _slot(name)
        kind, number, leaf = self._kinds[slot], self._sets[slot], self._leaf(slot)
        if kind is Kind.EDGE_INDEX:
            return self._with_edges(chunk, number).edge_index
        if kind is Kind.WHOLE:
            part = leaf.detach()
        elif slot in self.weights:
            part = leaf.detach()[self._places(chunk, kind, number)]
        else:
            first, end = self.span(chunk, kind, number)
            part = self._permuted(name, slot, lambda: self._origins(kind, number))[first:end]
        return part.detach().requires_grad_() if leaf.requires_grad else part

    def _with_edges(self, chunk: Chunk, edge_set: int) -> Chunk:
        """Return the chunk with its edges of a set."""
        edges = self._plan.edge_set(edge_set)
        if edges is self._plan:
            return chunk
        return edges.whole.chunks[0] if chunk.is_whole else edges.chunks[chunk.index]

    def _permuted(self, name: str, slot: int, order: Callable[[], Tensor]) -> Tensor:
        number, leaf = self._numbers[slot], self._leaf(slot)
        cached = self._copies.get(name)
        if cached is None or cached[0] != number:
            with torch.inference_mode(False), torch.no_grad():
                # A plan in order needs no copy. A new tensor says that values have changed.
                first = leaf if cached is None else leaf.detach()
                rows = first if self._plan.is_in_order else leaf.detach()[order()]
            cached = self._copies[name] = number, rows
        return cached[1]


class BatchInputs(PassInputs):
    """The leaves of a call on a batch of graphs; nodes and graphs of a micro-batch count from 0."""

    def __init__(self, call: Call, inputs: Inputs, plan: BatchPlan) -> None:
        super().__init__()
        assert inputs.graphs is not None
        self._call, self._graphs, self._plan = call, inputs.graphs, plan
        self._rows = GraphRows(inputs.graphs, plan.order)

    def span(self, chunk: MicroBatch, kind: Kind, number: int) -> tuple[int, int]:
        return self._rows.span(kind, number, chunk.span)

    def _origins(self, kind: Kind, number: int) -> Tensor:
        return self._rows.places(kind, number)

    def num_places(self, value: Value) -> int:
        first, end = self._rows.span(value.kind, value.edge_set, (0, len(self._plan.order)))
        return end - first

    def _slice(self, chunk: MicroBatch, name: str) -> Any:
        if name == NUM_GRAPHS:
            return chunk.end - chunk.start
        slot = _slot(name)
        leaf = self._leaf(slot)
        part = self._rows.take(leaf.detach(), self._graphs.leaves[slot], chunk.span)
        if part.is_inference() and torch.is_grad_enabled():
            part = part.clone()
        return part.requires_grad_() if leaf.requires_grad else part

    def _add(self, total: Tensor, slot: int, chunk: MicroBatch, grad: Tensor) -> None:
        how = self._graphs.leaves[slot]
        if how.kind is Kind.WHOLE:
            total += grad
        else:
            total.index_add_(how.dim, self._places(chunk, how.kind, how.number), grad)


def _slot(name: str) -> int:
    return int(name.removeprefix("leaf_"))
