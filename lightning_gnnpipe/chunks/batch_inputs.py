"""A batch of graphs, sliced into micro-batches whose nodes and graphs are numbered from 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.calls import Call, GraphRows, Inputs, Kind
from lightning_gnnpipe.graph import BatchPlan, MicroBatch
from lightning_gnnpipe.stages import NUM_GRAPHS, Value


class BatchInputs:
    """The leaves of a call on a batch of graphs, by micro-batch; see `PassInputs`."""

    def __init__(self, call: Call, inputs: Inputs, plan: BatchPlan) -> None:
        assert inputs.graphs is not None
        self._call, self._graphs, self._plan = call, inputs.graphs, plan
        self._rows = GraphRows(inputs.graphs, plan.order)
        self._grads: dict[int, Tensor] = {}

    def release(self) -> None:
        """Drop the gradients."""
        self._grads.clear()

    def slice(self, chunk: MicroBatch, names: Iterable[str]) -> dict[str, Any]:
        """Return the micro-batch's part of each leaf; for `NUM_GRAPHS`, its number of graphs."""
        return {name: self._slice(chunk, name) for name in names}

    def num_rows(self, chunk: MicroBatch, value: Value) -> int:
        first, end = self._rows.span(value.kind, value.edge_set, chunk.span)
        return end - first

    def num_places(self, value: Value) -> int:
        first, end = self._rows.span(value.kind, value.edge_set, (0, len(self._plan.order)))
        return end - first

    def places(self, chunk: MicroBatch, value: Value) -> Tensor:
        first, end = self._rows.span(value.kind, value.edge_set, chunk.span)
        return self._rows.places(value.kind, value.edge_set)[first:end]

    def whole_edge_leaf(self, name: str, *, edge_set: int | None, reverse: bool) -> Tensor | None:
        """Return None: layers run on whole graphs, and read no edges of other chunks."""

    def add_grads(self, chunk: MicroBatch, leaves: dict[str, Any]) -> None:
        for name, part in leaves.items():
            if not isinstance(part, Tensor) or part.grad is None:
                continue
            slot = _slot(name)
            leaf, how = self._call.leaves[slot], self._graphs.leaves[slot]
            if slot not in self._grads:
                self._grads[slot] = torch.zeros_like(leaf)
            if how.kind is Kind.WHOLE:
                self._grads[slot] += part.grad
                continue
            first, end = self._rows.span(how.kind, how.number, chunk.span)
            places = self._rows.places(how.kind, how.number)[first:end]
            self._grads[slot].index_add_(how.dim, places, part.grad)

    def take_grad(self, slot: int) -> Tensor:
        grad = self._grads.get(slot)
        return torch.zeros_like(self._call.leaves[slot]) if grad is None else grad

    def _slice(self, chunk: MicroBatch, name: str) -> Any:
        if name == NUM_GRAPHS:
            return chunk.end - chunk.start
        slot = _slot(name)
        leaf = self._call.leaves[slot]
        part = self._rows.take(leaf.detach(), self._graphs.leaves[slot], chunk.span)
        if part.is_inference() and torch.is_grad_enabled():
            part = part.clone()
        return part.requires_grad_() if leaf.requires_grad else part


def _slot(name: str) -> int:
    return int(name.removeprefix("leaf_"))
