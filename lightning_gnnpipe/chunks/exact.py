"""An exact pass in chunks: layer by layer over all chunks, in the memory of one chunk's layer.

    layer 1   chunks 0 1 2   each runs until it needs rows, or sums, that another has not written
              chunks 0 1 2   each runs again, from the layer's inputs, with what has been written
    layer 2   ...

A layer that exchanges once runs at most twice up to there. What chunks exchange is freed when the
next layer begins; of a training pass the inputs of each layer stay. Backward takes the layers in
reverse, computes each chunk again, and waits at the same places for gradients of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import leaves_behind
from lightning_gnnpipe.chunks.allocator import return_freed_memory
from lightning_gnnpipe.chunks.step import PassSpec, Step, kept_buffers, run_segments
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.stages import Segment, restored_on_errors
from lightning_gnnpipe.staleness import ExactStore, HostCopies, NotYet
from lightning_gnnpipe.types import Phase


def exact_context(
    plan: ChunkPlan, context: MessageContext, copies: HostCopies | None = None
) -> MessageContext:
    """Return a context in which the chunks of `plan` see what they would in `context` at once.

    `copies`: make tables for rows of the layers.
    """
    exact = MessageContext(ExactStore(plan, context.store, copies), plan, context.edges)
    exact.replaced, exact.is_refresh = context.replaced, context.is_refresh
    exact.dtypes = context.dtypes
    return exact


class ExactStep(Step):
    """Runs one rank's part of an exact pass in chunks."""

    def __init__(self, spec: PassSpec) -> None:
        super().__init__(spec)
        assert isinstance(spec.context, MessageContext) and isinstance(spec.plan, ChunkPlan)
        assert isinstance(spec.context.store, ExactStore)
        self._store = spec.context.store
        self._copies = self._store.copies
        self._leaves: dict[int, dict[str, Any]] = {}  # by chunk
        self._received: dict[int, list[Tensor]] = {}
        self._inputs: list[dict[int, dict[str, Any]]] = []  # of each layer, by chunk
        self._grads: dict[int, dict[str, Tensor]] = {}  # of values, by chunk
        kind = self._device.type
        self._autocast = partial(
            torch.autocast,
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
        )

    def forward(self) -> list[Tensor]:
        """Run the forward phase; see `Step.forward`."""
        spec, stage, values = self.spec, self._stage, dict[int, dict[str, Any]]()
        for chunk, arrived in self._receive("forward", spec.order):
            received = list(map(self._copies.keep, arrived))
            leaves = self._leaves[chunk.index] = spec.inputs.slice(chunk, stage.leaves)
            values[chunk.index] = leaves | dict(zip(stage.received, received, strict=True))
            if spec.is_training:
                self._received[chunk.index] = received
        for segment, unread in zip(stage.computed, self._unread, strict=True):
            if spec.is_training:
                kept = {i: {n: v[n] for n in segment.inputs} for i, v in values.items()}
                self._inputs.append(kept)
            self._run_all("forward", partial(self._compute_layer, segment, unread, values))
            self._store.end_layer(keeps_rows=True)
        outputs = [self._empty(spec.inputs.num_places(one), one) for one in spec.outputs]
        for chunk in self._chunks(spec.order):
            sent = [values[chunk.index][name] for name in stage.sent]
            for value, part in zip(self._sent, sent, strict=True):
                self._check_rows(chunk, value, part)
            if self._is_last:
                for output, value, part in zip(outputs, spec.outputs, sent, strict=True):
                    output[spec.inputs.places(chunk, value)] = part
            self._send("forward", chunk, sent)
            del values[chunk.index]
        if self._targets["forward"] is not None:
            spec.transport.flush()
        if not spec.is_training:
            self._copies.give_back()
        return self._collect(outputs)

    def backward(self, output_grads: Sequence[Tensor], before_last: Callable[[], None]) -> None:
        """Run the backward phase; see `Step.backward`."""
        spec, stage, order = self.spec, self._stage, self.spec.order[::-1]
        names = [name for name in stage.sent if stage.values[name].requires_grad]
        for chunk, received in self._receive("backward", order):
            if chunk.index == order[-1]:
                before_last()
            given = dict(zip(names, received, strict=True)) if received else {}
            if self._is_last:
                pairs = zip(stage.sent, output_grads, spec.outputs, strict=True)
                given = {name: grad[spec.inputs.places(chunk, v)] for name, grad, v in pairs}
            self._grads[chunk.index] = {n: self._copies.keep(one) for n, one in given.items()}
        for segment in reversed(stage.computed):
            inputs = self._inputs.pop()
            self._run_all("backward", partial(self._differentiate_layer, segment, inputs))
            self._store.end_layer(keeps_rows=False)
        for chunk in self._chunks(order):
            spec.inputs.add_grads(chunk, self._leaves.pop(chunk.index))
            grads, received = self._grads.pop(chunk.index), self._received.pop(chunk.index)
            named = zip(stage.received, received, strict=True)
            found = [
                grads.get(name, torch.zeros_like(tensor))
                for name, tensor in named
                if stage.values[name].requires_grad
            ]
            self._send("backward", chunk, found)
        # Sends may still run. This rank writes again once its neighbour has received all.
        self._copies.give_back()

    def _chunks(self, order: Sequence[int]) -> list[Chunk]:
        assert isinstance(self.spec.plan, ChunkPlan)
        return [self.spec.plan.chunks[index] for index in order]

    def _run_all(self, phase: Phase, run: Callable[[Chunk], None]) -> None:
        """Run one layer on all chunks, each again until it has met all it needs."""
        order = self.spec.order if phase == "forward" else self.spec.order[::-1]
        waiting = self._chunks(order)
        while waiting:
            before, left = self._store.num_written, list[Chunk]()
            for chunk in waiting:
                with self._timed(phase, chunk.index):
                    try:
                        run(chunk)
                    except NotYet:
                        left.append(chunk)
            assert len(left) < len(waiting) or self._store.num_written > before, "chunks wait"
            waiting = left
        if self.spec.saves_memory:
            return_freed_memory()

    def _run(self, segment: Segment, chunk: Chunk, inputs: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(inputs)
        with restored_on_errors(segment.module):  # and where it waits
            run_segments([segment], values, chunk, self.spec.context, self.spec.seed_of)
        return values

    def _compute_layer(
        self,
        segment: Segment,
        unread: Sequence[str],
        by_chunk: dict[int, dict[str, Any]],
        chunk: Chunk,
    ) -> None:
        values = by_chunk[chunk.index]
        found = self._run(segment, chunk, self._differentiable(segment, values))
        values.update((n, self._copies.keep(found[n].detach())) for n in segment.outputs)
        for name in unread:
            value = values.pop(name)
            if not self.spec.is_training and isinstance(value, Tensor):
                self._copies.give_back([value])

    def _differentiate_layer(
        self, segment: Segment, by_chunk: dict[int, dict[str, Any]], chunk: Chunk
    ) -> None:
        inputs = self._differentiable(segment, by_chunk[chunk.index])
        with self._autocast(), torch.enable_grad(), kept_buffers([segment]):
            values = self._run(segment, chunk, inputs)
        grads, ends = self._grads[chunk.index], segment.outputs
        roots = [n for n in ends if n in grads and values[n].requires_grad]
        outputs = [values[name] for name in roots]
        # All at once, and also of weights that other modules hold: a run that waits adds nothing.
        sources, found = leaves_behind(outputs), list[Tensor | None]()
        if sources:
            of_outputs = [grads[name] for name in roots]
            with torch.autocast(self._device.type, enabled=False):
                found += torch.autograd.grad(
                    outputs, sources, of_outputs, retain_graph=True, allow_unused=True
                )
        done = [grads.pop(name, None) for name in ends]  # a gradient of an input may be one of them
        names = {id(inputs[name]): name for name in inputs if not name.startswith("leaf_")}
        for source, grad in zip(sources, found, strict=True):
            name = names.get(id(source), "")
            if grad is not None and name:
                total = grads[name] + grad if name in grads else grad
                self._copies.give_back([grads.pop(name, None)])
                grads[name] = self._copies.keep(total)
            elif grad is not None:
                torch.autograd.backward([source], [grad])
        self._copies.give_back(done)
        del by_chunk[chunk.index]

    def _differentiable(self, segment: Segment, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layer's inputs, those that need a gradient as new leaves of autograd."""
        found, known = {name: values[name] for name in segment.inputs}, self._stage.values
        for name, value in found.items() if self.spec.is_training else ():
            if not name.startswith("leaf_") and known[name].requires_grad:
                found[name] = value.detach().requires_grad_()
        return found
