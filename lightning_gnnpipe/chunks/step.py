"""Runs the actions of a schedule in one pass over the batch.

The batch is one graph in chunks, or many graphs in micro-batches, also called chunks here.

stage s-1                 stage s                                   stage s+1
sent      --forward-->    received, leaves -> segments -> sent     --forward-->   received
grads of sent <--backward--  received.grad  <- autograd <- grads   <--backward--
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.chunks.chunk_run import PassSpec, Piece, run_recomputed, run_segments
from lightning_gnnpipe.chunks.step_trace import Recorder
from lightning_gnnpipe.comm import Label
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.schedule import Action, Arrived, Op
from lightning_gnnpipe.stages import Stage, Value
from lightning_gnnpipe.types import TrafficKind

_NOTHING: Arrived = {}

# From a chunk, and the outputs in the user's order, to the gradients of the chunk's rows.
GradsOf = Callable[[Any, Sequence[Tensor]], Sequence[Tensor]]


@dataclass(slots=True)
class _ChunkState:
    """Inputs and outputs of a chunk's autograd graph on a stage."""

    received: list[Tensor]
    leaves: dict[str, Tensor]
    sent: list[Tensor]


class Step:
    """Runs one rank's actions of one pass."""

    def __init__(self, spec: PassSpec) -> None:
        self.spec = spec
        spec.context.leaves = spec.inputs
        self._mesh, self._device = spec.transport.mesh, spec.transport.world.device
        self._chunks: dict[tuple[int, int], _ChunkState] = {}
        self._grads_of: GradsOf | None = None
        self.recorder = Recorder(self._mesh.rank, lambda: spec.transport.waited_s)
        self._outputs = [
            torch.empty(
                (spec.inputs.num_places(value), *value.row_shape),
                dtype=value.dtype,
                device=self._device,
            )
            for value in spec.outputs
        ]

    def forward(
        self,
        actions: Sequence[Action],
        arrived: Arrived = _NOTHING,
        grads_of: GradsOf | None = None,
    ) -> list[Tensor]:
        """Run the forward phase; return the outputs on all ranks, `[num_rows, *]` in user order.

        With interleaved backwards, `grads_of` is called when the outputs of a chunk are computed.
        """
        self._grads_of = grads_of
        self.run(actions, arrived)
        self.spec.transport.flush()
        self._grads_of = None
        return self.collect()

    def collect(self) -> list[Tensor]:
        """Broadcast the outputs from the last stage, and return them; a collective call."""
        outputs, self._outputs = self._outputs, []
        last, shard = self._mesh.num_stages - 1, self.spec.plan.shard
        for output, value in zip(outputs, self.spec.outputs, strict=True):
            if shard is None:
                self.spec.transport.broadcast(output, self._mesh.rank_of(last), "output")
                continue
            for index in range(self._mesh.num_shards):
                places = self.spec.inputs.places_of_shard(index, value)
                rows = output[places]
                self.spec.transport.broadcast(rows, self._mesh.rank_of(last, index), "output")
                output[places] = rows
        return outputs

    def backward(
        self,
        actions: Sequence[Action],
        output_grads: Sequence[Tensor],
        on_last: Callable[[], None],
    ) -> None:
        """Run backward from `output_grads` (user's order); call `on_last` before the last chunk."""
        self._grads_of = lambda chunk, _: [
            grad[self.spec.inputs.places(chunk, value)]
            for grad, value in zip(output_grads, self.spec.outputs, strict=True)
        ]
        last = max(i for i, action in enumerate(actions) if action.op is Op.B)
        self.run(actions[:last])
        on_last()
        self.run(actions[last:])
        self.spec.transport.flush()
        self._grads_of = None

    def run(self, actions: Sequence[Action], arrived: Arrived = _NOTHING) -> None:
        """Run `actions`; `arrived` maps an action to the sends that can be freed after it."""
        for action in actions:
            stage, chunk = self.spec.stages[action.stage], self.spec.plan.chunks[action.chunk]
            _METHODS[action.op](self, stage, chunk)
            for send in arrived.get(action, ()):
                self.spec.transport.release(_label(send))

    def _forward(self, stage: Stage, chunk: Piece) -> None:
        """Compute one chunk on a stage.

        Roughly: received = wait(); values = segments(leaves(chunk), received); save for backward.
        """
        spec, received = self.spec, list[Tensor]()
        if stage.index > 0:
            label = Label("forward", chunk.index, stage.index - 1)
            received = spec.transport.wait_receive(label)
            for name, tensor in zip(stage.received, received, strict=True):
                tensor.requires_grad_(spec.is_training and stage.values[name].requires_grad)
        with self.recorder.record(f"{stage.index}F{chunk.index}"):
            leaves = spec.inputs.slice(chunk, stage.leaves)
            values = leaves | dict(zip(stage.received, received, strict=True))
            run = run_recomputed if spec.recompute and spec.is_training else run_segments
            run(stage.computed, values, chunk, spec.context, spec.seed_of, stage.sent)
            sent = [values[name] for name in stage.sent]
            for value, part in zip(_sent_values(stage), sent, strict=True):
                self._check_rows(chunk, value, part)
            if self._is_last(stage):
                for output, value, part in zip(self._outputs, spec.outputs, sent, strict=True):
                    output[spec.inputs.places(chunk, value)] = part.detach()
            if spec.is_training or not self._is_last(stage):
                kept = received if spec.is_training else []
                self._chunks[stage.index, chunk.index] = _ChunkState(kept, leaves, sent)

    def _backward(self, stage: Stage, chunk: Piece) -> None:
        """Compute the gradients of one chunk on a stage.

        Roughly: autograd.backward(sent, wait()); the gradients are then in received and parameters.
        """
        spec, state = self.spec, self._chunks[stage.index, chunk.index]
        grads: list[Tensor] = []
        if not self._is_last(stage):
            label = Label("backward", chunk.index, stage.index + 1)
            received, none = iter(spec.transport.wait_receive(label)), torch.empty(0)
            grads = [next(received) if one.requires_grad else none for one in _sent_values(stage)]
        with self.recorder.record(f"{stage.index}B{chunk.index}"):
            if self._is_last(stage):
                assert self._grads_of is not None
                grads = list(self._grads_of(chunk, self._outputs))
            roots = [(t, g) for t, g in zip(state.sent, grads, strict=True) if t.requires_grad]
            if roots:
                with torch.autocast(self._device.type, enabled=False):
                    torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            spec.inputs.add_grads(chunk, state.leaves)
        if stage.index == 0:
            del self._chunks[stage.index, chunk.index]

    def _receive_forward(self, stage: Stage, chunk: Piece) -> None:
        values = [stage.values[name] for name in stage.received]
        self._receive("forward", chunk, stage.index - 1, values)

    def _send_forward(self, stage: Stage, chunk: Piece) -> None:
        sent = self._chunks[stage.index, chunk.index].sent
        self._send("forward", chunk, stage, stage.index + 1, sent)
        if not self.spec.is_training:
            del self._chunks[stage.index, chunk.index]

    def _receive_backward(self, stage: Stage, chunk: Piece) -> None:
        values = [value for value in _sent_values(stage) if value.requires_grad]
        self._receive("backward", chunk, stage.index + 1, values)

    def _send_backward(self, stage: Stage, chunk: Piece) -> None:
        state = self._chunks.pop((stage.index, chunk.index))
        grads = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in state.received
            if tensor.requires_grad
        ]
        self._send("backward", chunk, stage, stage.index - 1, grads)

    def _receive(
        self, kind: TrafficKind, chunk: Piece, source: int, values: Sequence[Value]
    ) -> None:
        """Start to receive a chunk's rows of `values` from the stage `source`."""
        buffers = [
            torch.empty(self._shape(chunk, value), dtype=value.dtype, device=self._device)
            for value in values
        ]
        label, codec = Label(kind, chunk.index, source), self.spec.codecs.of(kind)
        self.spec.transport.post_receive(self._rank_of(source), label, buffers, codec)

    def _send(
        self, kind: TrafficKind, chunk: Piece, stage: Stage, target: int, tensors: Sequence[Tensor]
    ) -> None:
        """Start to send `tensors` to the stage `target`."""
        label, codec = Label(kind, chunk.index, stage.index), self.spec.codecs.of(kind)
        self.spec.transport.send(self._rank_of(target), label, tensors, codec)

    def _is_last(self, stage: Stage) -> bool:
        return stage.index == self.spec.num_stages - 1

    def _rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage: stages are assigned round-robin."""
        return self._mesh.rank_of(stage % self._mesh.num_stages)

    def _shape(self, chunk: Piece, value: Value) -> tuple[int, ...]:
        return self.spec.inputs.num_rows(chunk, value), *value.row_shape

    def _check_rows(self, chunk: Piece, value: Value, part: Tensor) -> None:
        """Raise unless `part` has the shape that the next stage, or the user, expects."""
        shape = self._shape(chunk, value)
        if part.shape != shape:
            raise UnsupportedError(
                expected=f"a tensor with one row per {value.kind.value} of shape "
                f"{list(shape)} in chunk {chunk.index}",
                found=f"shape {list(part.shape)}",
                remedy="The shape of a row must be the same in every batch. If the model "
                "pools over graphs, give the pooling layer their number: "
                "size=data.num_graphs.",
            )


def _sent_values(stage: Stage) -> list[Value]:
    return [stage.values[name] for name in stage.sent]


def _label(send: Action) -> Label:
    """Return the label of the message that `send` sends."""
    return Label("backward" if send.op.is_backward else "forward", send.chunk, send.stage)


_METHODS: dict[Op, Callable[[Step, Stage, Piece], None]] = {
    Op.F: Step._forward,
    Op.B: Step._backward,
    Op.SEND_F: Step._send_forward,
    Op.RECV_F: Step._receive_forward,
    Op.SEND_B: Step._send_backward,
    Op.RECV_B: Step._receive_backward,
}
