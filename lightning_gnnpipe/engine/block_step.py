"""A step that goes back by blocks of layers, over all chunks at once.

    stage 0   F2 F0 F1 .  .  B    its block begins with what stage 1 sent in the last step
    stage 1   .  F2 F0 F1 .  B    its block begins with the gradient of the loss

As in an exact step a stage sends one message, but for that it has not waited for the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.layer_graphs import Grads, LayerGraphs
from lightning_gnnpipe.engine.step import Step
from lightning_gnnpipe.engine.step_parts import Piece, StepParts
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.schedule import Action
from lightning_gnnpipe.stages import Stage


class BlockStep(Step):
    """A step that goes back by blocks. The backward phase is that of a schedule of one chunk.

    Args:
        parts: What the pass is made of, `blocks` among it.
    """

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        assert parts.blocks is not None and isinstance(parts.context, MessageContext)
        assert isinstance(parts.plan, ChunkPlan) and isinstance(parts.inputs, PlannedInputs)
        self._blocks, self._context, self._inputs = parts.blocks, parts.context, parts.inputs
        self._graphs = LayerGraphs(parts.context, recompute=parts.recompute)
        self._chunk_list, self._whole = parts.plan.chunks, parts.plan.whole.chunks[0]
        self._awaited: list[Stage] = []  # those to which gradients come for the next step
        self._found: dict[int, Grads] = {}  # by stage, of what it was given

    def backward(
        self,
        actions: Sequence[Action],
        output_grads: Sequence[Tensor],
        on_last: Callable[[], None],
    ) -> None:
        """Run the backward phase; see `Step.backward`."""
        with self._context.cuts.into({}):  # layers that are computed again are cut again
            super().backward(actions, output_grads, on_last)
        for stage in self._awaited:
            self._blocks.late.put(_end(stage), self._receive(stage))

    def _run_segments(self, stage: Stage, values: dict[str, Any], chunk: Piece) -> None:
        self._graphs.run(stage.segments, values, chunk, self.parts.seed_of, stage.sent)

    def _piece(self, action: Action) -> Piece:
        return self._whole if action.op.is_backward else self._chunk_list[action.chunk]

    def _backward(self, stage: Stage, chunk: Piece) -> None:
        """Take the gradients of all chunks back through a stage.

        Roughly: for each block of the stage, the last first: layer by layer, from what waits or
        from what the block behind has just found.
        """
        begins = self._begin(stage)
        with self.recorder.record(f"{stage.index}B{chunk.index}"):
            if self._is_last(stage):
                begins = self._of_outputs(stage, chunk)
            for one in self._chunk_list:
                self._chunks[stage.index, one.index].sent = []
            with torch.autocast(self._device.type, enabled=False):
                self._found[stage.index] = self._go_back(stage, begins)
            for one in self._chunk_list:
                self._inputs.add_grads(one, self._chunks.pop((stage.index, one.index)).leaves)

    def _begin(self, stage: Stage) -> Grads:
        """Return the gradients of what the stage has sent: of the last step, if they wait."""
        cut = _end(stage)
        if self._is_last(stage):
            return {}
        late = self._late(cut) if cut in self._blocks.cuts else None
        if late is not None:
            self._awaited.append(stage)
            return late
        grads = self._receive(stage)
        if cut in self._blocks.cuts:
            self._blocks.late.put(cut, grads)
        return grads

    def _go_back(self, stage: Stage, begins: Grads) -> Grads:
        """Return the gradients of what the stage was given, from those of what it has sent."""
        first, end, late = stage.segments[0].index, _end(stage), self._blocks.late
        inner = [cut for cut in self._blocks.cuts if first < cut < end]
        found = begins
        for low, high in reversed(list(pairwise([first, *inner, end]))):
            if high in inner:
                begins = self._late(high) or found
                late.put(high, found)
            by_chunk = {one.index: self._cut(begins, one) for one in self._chunk_list}
            segments = stage.segments[low - first : high - first]
            self._graphs.backward(segments[::-1], list(by_chunk), by_chunk)
            for index, grads in by_chunk.items():
                leaves = self._chunks[stage.index, index].leaves
                for name in grads.keys() & leaves.keys():
                    grad, known = grads.pop(name), leaves[name].grad
                    leaves[name].grad = grad if known is None else known + grad
            found = {name: self._join(name, by_chunk) for name in self._blocks.crossing(low)}
        return found

    def _late(self, cut: int) -> Grads | None:
        """Return what waits at `cut`; None unless it is of what is handed on there now."""
        late, values = self._blocks.late.take(cut), self._blocks.layers.values
        if late is None or late.keys() != set(self._blocks.crossing(cut)):
            return None
        for name, grad in late.items():
            rows = self._inputs.num_rows(self._whole, values[name])
            is_like = grad.shape == (rows, *values[name].row_shape)
            if not is_like or grad.dtype != values[name].dtype:
                return None
        return late

    def _cut(self, grads: Grads, chunk: Chunk) -> Grads:
        """Return the part of each gradient that belongs to the chunk."""
        return {name: grad[self._rows(name, chunk)] for name, grad in grads.items()}

    def _join(self, name: str, by_chunk: dict[int, Grads]) -> Tensor:
        """Return the gradient of a value, of all chunks; zeros where there is none."""
        whole = self._buffer(self._whole, self._blocks.layers.values[name])
        for chunk in self._chunk_list:
            own = by_chunk[chunk.index].get(name)
            part = whole[self._rows(name, chunk)]
            part.zero_() if own is None else part.copy_(own)
        return whole

    def _rows(self, name: str, chunk: Chunk) -> slice:
        return slice(*self._inputs.bounds(chunk, self._blocks.layers.values[name]))

    def _of_outputs(self, stage: Stage, chunk: Piece) -> Grads:
        assert self._grads_of is not None
        grads = self._grads_of(chunk, self._outputs)
        pairs = zip(stage.sent, grads, strict=True)
        return {name: grad for name, grad in pairs if stage.values[name].requires_grad}

    def _receive(self, stage: Stage) -> Grads:
        """Wait for the gradients of what the stage has sent."""
        grads = self._wait_backward(stage, self._whole)
        pairs = zip(stage.sent, grads, strict=True)
        return {name: grad for name, grad in pairs if stage.values[name].requires_grad}

    def _send_backward(self, stage: Stage, chunk: Piece) -> None:
        found = self._found.pop(stage.index)
        names = [name for name in stage.received if stage.values[name].requires_grad]
        self._send_grads(stage, chunk, [found[name] for name in names])


def _end(stage: Stage) -> int:
    """Return the number of the layer behind the stage."""
    return stage.segments[-1].index + 1
