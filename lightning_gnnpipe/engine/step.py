"""One pass over the batch: what the actions of a schedule work on, and the dispatch over them.

The batch is one graph in chunks, or many graphs in micro-batches, which are chunks as well here.

stage s-1                 stage s                                   stage s+1
sent      --forward-->    received, leaves -> segments -> sent     --forward-->   received
grads of sent <--backward--  received.grad  <- autograd <- grads   <--backward--
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.comm import Codec, Transport
from lightning_gnnpipe.engine.chunk_run import SeedOf, run_segments
from lightning_gnnpipe.engine.inputs import PassInputs
from lightning_gnnpipe.engine.recompute import run_recomputed
from lightning_gnnpipe.engine.trace import Recorder
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.graph import BatchPlan, Chunk, ChunkPlan, MicroBatch
from lightning_gnnpipe.passing import MessageContext, NativeContext
from lightning_gnnpipe.schedule import Action, Op
from lightning_gnnpipe.stages import Stage, Value
from lightning_gnnpipe.types import TrafficKind

Piece = Chunk | MicroBatch


@dataclass(frozen=True, slots=True)
class StepParts:
    """What one pass is made of.

    Attributes:
        stage: This rank's layers.
        outputs: What is known of the model's outputs, on every rank.
        plan: The chunks; the one-chunk plan in exact passes over one graph.
        inputs: The batch, loaded.
        context: Serves message passing.
        transport: The other ranks.
        seed_of: Seeds of the segments' random numbers; None leaves the stream alone.
        is_training: Whether a backward pass follows.
        recompute: Whether backward computes activations again instead of keeping them.
        codec: Of what stages send each other.
    """

    stage: Stage
    outputs: tuple[Value, ...]
    plan: ChunkPlan | BatchPlan
    inputs: PassInputs
    context: MessageContext | NativeContext
    transport: Transport
    seed_of: SeedOf | None
    is_training: bool
    recompute: bool
    codec: Codec


@dataclass(slots=True)
class _ChunkState:
    """Where a chunk's autograd graph begins and ends on this stage."""

    received: list[Tensor]
    leaves: dict[str, Tensor]
    sent: list[Tensor]


class Step:
    """Runs one rank's actions of one pass.

    Args:
        parts: What the pass is made of.

    Attributes:
        parts: The same.
        recorder: Of the actions.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        parts.context.leaves = parts.inputs
        self._mesh = parts.transport.mesh
        self._device = parts.transport.world.device
        self._leaves = parts.stage.leaves
        self._chunks: dict[int, _ChunkState] = {}
        self._output_grads: Sequence[Tensor] = ()
        self._previous = self._mesh.rank_of(self._mesh.stage - 1)
        self._next = self._mesh.rank_of(self._mesh.stage + 1)
        self._sent_values = [parts.stage.values[name] for name in parts.stage.sent]
        self.recorder = Recorder(self._mesh.rank, lambda: parts.transport.waited_s)
        self._outputs = [
            torch.empty(
                (parts.inputs.num_places(value), *value.row_shape),
                dtype=value.dtype,
                device=self._device,
            )
            for value in parts.outputs
        ]

    def forward(self, actions: Sequence[Action]) -> list[Tensor]:
        """Run the forward phase; return the outputs on every rank.

        Each is `[num_rows, *]`, in the user's order of nodes, or of graphs.
        """
        self.run(actions)
        self.parts.transport.flush()
        return self.collect()

    def collect(self) -> list[Tensor]:
        """Return the outputs on every rank, once the last stage has them; a collective call."""
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            self._share(output)
        return outputs

    def _share(self, output: Tensor) -> None:
        """Give all ranks the rows of `output`, `[num_rows, *]`, that the last stage's have."""
        transport, last = self.parts.transport, self._mesh.num_stages - 1
        shard = self.parts.plan.shard
        if shard is None:
            transport.broadcast(output, self._mesh.rank_of(last), "output")
            return
        for index in range(self._mesh.num_shards):
            nodes = shard.nodes(index)
            rows = output[nodes]
            transport.broadcast(rows, self._mesh.rank_of(last, index), "output")
            output[nodes] = rows

    def backward(
        self,
        actions: Sequence[Action],
        output_grads: Sequence[Tensor],
        on_last: Callable[[], None],
    ) -> None:
        """Run the backward phase.

        Args:
            actions: This rank's.
            output_grads: The gradients of the outputs, in the user's order.
            on_last: Called before the last chunk.
        """
        self._output_grads = output_grads
        last = max(i for i, action in enumerate(actions) if action.op is Op.B)
        self.run(actions[:last])
        on_last()
        self.run(actions[last:])
        self.parts.transport.flush()
        self._output_grads = ()

    def run(self, actions: Sequence[Action]) -> None:
        """Run `actions`; what they send need not have left."""
        for action in actions:
            _METHODS[action.op](self, self.parts.plan.chunks[action.chunk])

    def _forward(self, chunk: Piece) -> None:
        """Compute one chunk on this stage.

        Roughly: received = wait(); values = segments(leaves(chunk), received); keep what backward
        needs.
        """
        parts = self.parts
        received = self._wait_forward(chunk)
        with self.recorder.record(f"{self._mesh.stage}F{chunk.index}"):
            leaves = parts.inputs.slice(chunk, self._leaves)
            values = {**leaves, **dict(zip(parts.stage.received, received, strict=True))}
            run = run_recomputed if parts.recompute and parts.is_training else run_segments
            run(
                parts.stage.computed,
                values,
                chunk,
                parts.context,
                parts.seed_of,
                parts.stage.sent,
            )
            sent = [values[name] for name in parts.stage.sent]
            if not parts.is_training:
                received = []
            self._chunks[chunk.index] = _ChunkState(received, leaves, sent)
            for value, part in zip(self._sent_values, sent, strict=True):
                self._check_rows(chunk, value, part)
            if self._mesh.is_last:
                for output, value, part in zip(self._outputs, parts.outputs, sent, strict=True):
                    output[parts.inputs.places(chunk, value)] = part.detach()
                if not parts.is_training:
                    del self._chunks[chunk.index]

    def _backward(self, chunk: Piece) -> None:
        """Take the gradients of one chunk back through this stage.

        Roughly: autograd.backward(sent, wait()); the gradients are then in received and in the
        parameters.
        """
        parts = self.parts
        state = self._chunks[chunk.index]
        grads = self._wait_backward(chunk)
        with self.recorder.record(f"{self._mesh.stage}B{chunk.index}"):
            roots = [(t, g) for t, g in zip(state.sent, grads, strict=True) if t.requires_grad]
            if roots:
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            parts.inputs.add_grads(chunk, state.leaves)
        if self._mesh.is_first:
            del self._chunks[chunk.index]

    def _receive_forward(self, chunk: Piece) -> None:
        stage = self.parts.stage
        buffers = [self._buffer(chunk, stage.values[name]) for name in stage.received]
        self._post(self._previous, "forward", chunk, buffers)

    def _send_forward(self, chunk: Piece) -> None:
        sent = self._chunks[chunk.index].sent
        self._send(self._next, "forward", chunk, sent)
        if not self.parts.is_training:
            del self._chunks[chunk.index]

    def _receive_backward(self, chunk: Piece) -> None:
        known = self._sent_values
        buffers = [self._buffer(chunk, value) for value in known if value.requires_grad]
        self._post(self._next, "backward", chunk, buffers)

    def _send_backward(self, chunk: Piece) -> None:
        state = self._chunks.pop(chunk.index)
        grads = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in state.received
            if tensor.requires_grad
        ]
        self._send(self._previous, "backward", chunk, grads)

    def _post(self, rank: int, kind: TrafficKind, chunk: Piece, buffers: Sequence[Tensor]) -> None:
        parts = self.parts
        parts.transport.post_receive(rank, kind, chunk.index, buffers, parts.codec)

    def _send(self, rank: int, kind: TrafficKind, chunk: Piece, tensors: Sequence[Tensor]) -> None:
        parts = self.parts
        parts.transport.send(rank, kind, chunk.index, tensors, parts.codec)

    def _wait_forward(self, chunk: Piece) -> list[Tensor]:
        parts = self.parts
        if self._mesh.is_first:
            return []
        received = parts.transport.wait_receive("forward", chunk.index)
        for name, tensor in zip(parts.stage.received, received, strict=True):
            tensor.requires_grad_(parts.is_training and parts.stage.values[name].requires_grad)
        return received

    def _wait_backward(self, chunk: Piece) -> list[Tensor]:
        """Return one gradient for each sent value; an empty one where no gradient flows."""
        parts = self.parts
        if self._mesh.is_last:
            return [
                grad[parts.inputs.places(chunk, value)]
                for grad, value in zip(self._output_grads, parts.outputs, strict=True)
            ]
        received = iter(parts.transport.wait_receive("backward", chunk.index))
        known = self._sent_values
        return [next(received) if value.requires_grad else torch.empty(0) for value in known]

    def _buffer(self, chunk: Piece, value: Value) -> Tensor:
        shape = (self.parts.inputs.num_rows(chunk, value), *value.row_shape)
        return torch.empty(shape, dtype=value.dtype, device=self._device)

    def _check_rows(self, chunk: Piece, value: Value, part: Tensor) -> None:
        """Refuse rows of another number than the next stage, and the user, are told."""
        shape = (self.parts.inputs.num_rows(chunk, value), *value.row_shape)
        if part.shape != shape:
            raise UnsupportedError(
                explain(
                    expected=f"a tensor with one row a {value.kind.value} to have shape "
                    f"{list(shape)} in chunk {chunk.index}",
                    found=str(list(part.shape)),
                    remedy="Shapes of rows must be the same in every batch, and rows of nodes, "
                    "edges or graphs as many as there are: give pooling their number "
                    "(size=data.num_graphs).",
                )
            )


_METHODS: dict[Op, Callable[[Step, Piece], None]] = {
    Op.F: Step._forward,
    Op.B: Step._backward,
    Op.SEND_F: Step._send_forward,
    Op.RECV_F: Step._receive_forward,
    Op.SEND_B: Step._send_backward,
    Op.RECV_B: Step._receive_backward,
}
