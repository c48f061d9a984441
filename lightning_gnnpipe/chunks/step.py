"""One rank's part of a pass over the batch: all chunks forward, then backward.

The batch is one graph in chunks, or many graphs in micro-batches, also called chunks here.

stage s-1                 stage s                                   stage s+1
sent      --forward-->    received, leaves -> segments -> sent     --forward-->   received
grads of sent <--backward--  received.grad  <- autograd <- grads   <--backward--

Backward takes the chunks in reverse order: the readers of a chunk's fresh rows come before it, so
gradients are exact. Within a phase all messages between two ranks go one way and in the order of
the chunks on both sides, so they cannot deadlock; no message of one phase is left to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.chunks.chunk_run import PassSpec, Piece, run_recomputed, run_segments
from lightning_gnnpipe.chunks.step_trace import Recorder
from lightning_gnnpipe.comm import Label
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages import Value
from lightning_gnnpipe.types import Phase

_AHEAD = 2  # a receive is posted this many chunks before its own: a rank has at most 3 open


@dataclass(slots=True)
class _ChunkState:
    """Inputs and outputs of a chunk's autograd graph on a stage."""

    received: list[Tensor]
    leaves: dict[str, Tensor]
    sent: list[Tensor]


class Step:
    """Runs one rank's part of one pass."""

    def __init__(self, spec: PassSpec) -> None:
        self.spec, self._stage = spec, spec.stage
        spec.context.leaves = spec.inputs
        self._mesh, self._device = spec.transport.mesh, spec.transport.world.device
        earlier, later = map(self._rank_of, (self._stage.index - 1, self._stage.index + 1))
        self._sources: dict[Phase, int | None] = {"forward": earlier, "backward": later}
        self._targets: dict[Phase, int | None] = {"forward": later, "backward": earlier}
        self._sent = [self._stage.values[name] for name in self._stage.sent]
        self._expected: dict[Phase, list[Value]] = {
            "forward": [self._stage.values[name] for name in self._stage.received],
            "backward": [value for value in self._sent if value.requires_grad],
        }
        self._states: dict[int, _ChunkState] = {}  # by chunk
        self.recorder = Recorder(
            self._mesh.rank, self._stage.index, lambda: spec.transport.waited_s
        )

    def forward(self) -> list[Tensor]:
        """Run the forward phase; return the outputs on all ranks, `[num_rows, *]` in user order."""
        spec = self.spec
        outputs = [
            torch.empty(
                (spec.inputs.num_places(value), *value.row_shape),
                dtype=value.dtype,
                device=self._device,
            )
            for value in spec.outputs
        ]
        for chunk, received in self._receive("forward", spec.order):
            with self.recorder.record("forward", chunk.index):
                sent = self._compute(chunk, received)
                if self._mesh.is_last:
                    for output, value, part in zip(outputs, spec.outputs, sent, strict=True):
                        output[spec.inputs.places(chunk, value)] = part.detach()
            self._send("forward", chunk, sent)
        spec.transport.flush()
        return self._collect(outputs)

    def backward(self, output_grads: Sequence[Tensor]) -> None:
        """Run backward from `output_grads` (user's order)."""
        spec, order = self.spec, self.spec.order[::-1]
        for chunk, received in self._receive("backward", order):
            with self.recorder.record("backward", chunk.index):
                if self._mesh.is_last:
                    pairs = zip(output_grads, spec.outputs, strict=True)
                    grads = [grad[spec.inputs.places(chunk, value)] for grad, value in pairs]
                else:
                    given, none = iter(received), torch.empty(0)
                    grads = [next(given) if one.requires_grad else none for one in self._sent]
                found = self._differentiate(chunk, grads)
            self._send("backward", chunk, found)
        spec.transport.flush()

    def _compute(self, chunk: Piece, received: Sequence[Tensor]) -> list[Tensor]:
        """Compute one chunk, and keep for backward what autograd starts from."""
        spec, stage = self.spec, self._stage
        for name, tensor in zip(stage.received, received, strict=True):
            tensor.requires_grad_(spec.is_training and stage.values[name].requires_grad)
        leaves = spec.inputs.slice(chunk, stage.leaves)
        values = leaves | dict(zip(stage.received, received, strict=True))
        run = run_recomputed if spec.recompute and spec.is_training else run_segments
        run(stage.computed, values, chunk, spec.context, spec.seed_of, stage.sent)
        sent = [values[name] for name in stage.sent]
        for value, part in zip(self._sent, sent, strict=True):
            self._check_rows(chunk, value, part)
        if spec.is_training:
            self._states[chunk.index] = _ChunkState(list(received), leaves, sent)
        return sent

    def _differentiate(self, chunk: Piece, grads: Sequence[Tensor]) -> list[Tensor]:
        """Run autograd from gradients of sent tensors; return gradients of received ones."""
        state = self._states.pop(chunk.index)
        roots = [(t, g) for t, g in zip(state.sent, grads, strict=True) if t.requires_grad]
        if roots:
            with torch.autocast(self._device.type, enabled=False):
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        self.spec.inputs.add_grads(chunk, state.leaves)
        return [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in state.received
            if tensor.requires_grad
        ]

    def _receive(self, phase: Phase, order: Sequence[int]) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Yield the chunks, each with what the neighbour sent of it; receives are posted early."""
        chunks = [self.spec.plan.chunks[index] for index in order]
        source, transport = self._sources[phase], self.spec.transport
        for place, chunk in enumerate(chunks):
            if source is None:
                yield chunk, []
                continue
            first = place + _AHEAD if place else 0
            for early in chunks[first : place + _AHEAD + 1]:
                buffers = [
                    torch.empty(self._shape(early, value), dtype=value.dtype, device=self._device)
                    for value in self._expected[phase]
                ]
                codec = self.spec.codecs.of(phase)
                transport.post_receive(source, Label(phase, early.index), buffers, codec)
            yield chunk, transport.wait_receive(Label(phase, chunk.index))

    def _send(self, phase: Phase, chunk: Piece, tensors: Sequence[Tensor]) -> None:
        """Start to send `tensors` to the neighbour, if there is one."""
        target, codec = self._targets[phase], self.spec.codecs.of(phase)
        if target is not None:
            self.spec.transport.send(target, Label(phase, chunk.index), tensors, codec)

    def _collect(self, outputs: list[Tensor]) -> list[Tensor]:
        """Broadcast the outputs from the last stage, and return them; a collective call."""
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

    def _rank_of(self, stage: int) -> int | None:
        return self._mesh.rank_of(stage) if 0 <= stage < self._mesh.num_stages else None

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
