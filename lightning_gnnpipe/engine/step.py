"""One pass over the graph: what the actions of a schedule work on, and the dispatch over them.

stage s-1                 stage s                                   stage s+1
sent      --forward-->    received, leaves -> segments -> sent     --forward-->   received
grads of sent <--backward--  received.grad  <- autograd <- grads   <--backward--
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.chunk_run import SeedOf, run_segments
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.recompute import run_recomputed
from lightning_gnnpipe.engine.trace import Recorder
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.schedule import Action, Op
from lightning_gnnpipe.stages import Kind, Stage, Value


@dataclass(frozen=True, slots=True)
class StepParts:
    """What one pass is made of.

    Attributes:
        stage: This rank's layers.
        outputs: What is known of the model's outputs, on every rank.
        plan: The chunks; the one-chunk plan in exact passes.
        inputs: The batch, loaded.
        context: Serves message passing.
        transport: The other ranks.
        seed_of: Seeds of the segments' random numbers; None leaves the stream alone.
        is_training: Whether a backward pass follows.
        recompute: Whether backward computes activations again instead of keeping them.
    """

    stage: Stage
    outputs: tuple[Value, ...]
    plan: ChunkPlan
    inputs: PlannedInputs
    context: MessageContext
    transport: Transport
    seed_of: SeedOf | None
    is_training: bool
    recompute: bool


@dataclass(slots=True)
class _ChunkState:
    """Where a chunk's autograd graph begins and ends on this stage."""

    received: list[Tensor]
    leaves: dict[str, Tensor]
    sent: list[Tensor]


class Step:
    """Runs one rank's actions of one pass."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        parts.context.leaves = parts.inputs
        self._axis = parts.transport.axis
        self._leaves = parts.stage.leaves
        self._chunks: dict[int, _ChunkState] = {}
        self._output_grads: Sequence[Tensor] = ()
        self.recorder = Recorder(self._axis.stage)
        self._outputs = [
            torch.empty(
                (parts.plan.num_nodes, *value.row_shape),
                dtype=value.dtype,
                device=self._axis.device,
            )
            for value in parts.outputs
        ]

    def forward(self, actions: Sequence[Action]) -> list[Tensor]:
        """Run the forward phase; return the outputs on every rank.

        Each is `[num_nodes, *]`, in the user's node order.
        """
        self._run(actions)
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            self._parts.transport.broadcast(output, self._axis.num_stages - 1, "output")
        return outputs

    def backward(self, actions: Sequence[Action], output_grads: Sequence[Tensor]) -> None:
        """Run the backward phase from the gradients of the outputs, in the user's node order."""
        self._output_grads = output_grads
        self._run(actions)
        self._output_grads = ()

    def _run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            _METHODS[action.op](self, self._parts.plan.chunks[action.chunk])
        self._parts.transport.flush()

    def _forward(self, chunk: Chunk) -> None:
        """Compute one chunk on this stage.

        Roughly: received = wait(); values = segments(leaves(chunk), received); keep what backward
        needs.
        """
        parts = self._parts
        received = self._wait_forward(chunk)
        with self.recorder.record(f"{self._axis.stage}F{chunk.index}"):
            leaves = parts.inputs.slice(chunk, self._leaves)
            values = {**leaves, **dict(zip(parts.stage.received, received, strict=True))}
            run = run_recomputed if parts.recompute and parts.is_training else run_segments
            run(
                parts.stage.segments,
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
            if self._axis.is_last:
                rows = parts.plan.perm[chunk.start : chunk.end]
                for output, part in zip(self._outputs, sent, strict=True):
                    output[rows] = part.detach()
                if not parts.is_training:
                    del self._chunks[chunk.index]

    def _backward(self, chunk: Chunk) -> None:
        """Take the gradients of one chunk back through this stage.

        Roughly: autograd.backward(sent, wait()); the gradients are then in received and in the
        parameters.
        """
        parts = self._parts
        state = self._chunks[chunk.index]
        grads = self._wait_backward(chunk)
        with self.recorder.record(f"{self._axis.stage}B{chunk.index}"):
            roots = [(t, g) for t, g in zip(state.sent, grads, strict=True) if t.requires_grad]
            if roots:
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            parts.inputs.add_grads(chunk, state.leaves)
        if self._axis.is_first:
            del self._chunks[chunk.index]

    def _receive_forward(self, chunk: Chunk) -> None:
        stage = self._parts.stage
        buffers = [self._buffer(chunk, stage.values[name]) for name in stage.received]
        self._parts.transport.post_receive(self._axis.stage - 1, "forward", chunk.index, buffers)

    def _send_forward(self, chunk: Chunk) -> None:
        sent = self._chunks[chunk.index].sent
        self._parts.transport.send(self._axis.stage + 1, "forward", chunk.index, sent)
        if not self._parts.is_training:
            del self._chunks[chunk.index]

    def _receive_backward(self, chunk: Chunk) -> None:
        stage = self._parts.stage
        known = [stage.values[name] for name in stage.sent]
        buffers = [self._buffer(chunk, value) for value in known if value.requires_grad]
        self._parts.transport.post_receive(self._axis.stage + 1, "backward", chunk.index, buffers)

    def _send_backward(self, chunk: Chunk) -> None:
        state = self._chunks.pop(chunk.index)
        grads = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in state.received
            if tensor.requires_grad
        ]
        self._parts.transport.send(self._axis.stage - 1, "backward", chunk.index, grads)

    def _wait_forward(self, chunk: Chunk) -> list[Tensor]:
        parts = self._parts
        if self._axis.is_first:
            return []
        received = parts.transport.wait_receive("forward", chunk.index)
        for name, tensor in zip(parts.stage.received, received, strict=True):
            tensor.requires_grad_(parts.is_training and parts.stage.values[name].requires_grad)
        return received

    def _wait_backward(self, chunk: Chunk) -> list[Tensor]:
        """Return one gradient for each sent value; an empty one where no gradient flows."""
        parts = self._parts
        if self._axis.is_last:
            rows = parts.plan.perm[chunk.start : chunk.end]
            return [grad[rows] for grad in self._output_grads]
        received = iter(parts.transport.wait_receive("backward", chunk.index))
        known = (parts.stage.values[name] for name in parts.stage.sent)
        return [next(received) if value.requires_grad else torch.empty(0) for value in known]

    def _buffer(self, chunk: Chunk, value: Value) -> Tensor:
        rows = chunk.num_nodes
        if value.kind is Kind.EDGE:
            first, end = self._parts.inputs.edge_bounds(chunk, value.edge_set)
            rows = end - first
        return torch.empty((rows, *value.row_shape), dtype=value.dtype, device=self._axis.device)


_METHODS: dict[Op, Callable[[Step, Chunk], None]] = {
    Op.F: Step._forward,
    Op.B: Step._backward,
    Op.SEND_F: Step._send_forward,
    Op.RECV_F: Step._receive_forward,
    Op.SEND_B: Step._send_backward,
    Op.RECV_B: Step._receive_backward,
}
