"""One rank's part of a pass over the batch: all chunks forward, then backward.

The batch is one graph in chunks, or many graphs in micro-batches, also called chunks here.

stage s-1                 stage s                                   stage s+1
sent      --forward-->    received, leaves -> segments -> sent     --forward-->   received
grads of sent <--backward--  received.grad  <- autograd <- grads   <--backward--

Backward takes the chunks in reverse order: the readers of a chunk's fresh rows come before it, so
gradients are exact. Within a phase all messages between two ranks go one way and in the order of
the chunks on both sides, so they cannot deadlock; no message of one phase is left to the next.

If activations are recomputed, a chunk keeps only the inputs of the stage, and which of its halo
reads were stale. If the whole graph is one chunk, layers are recomputed one at a time, so that not
all activations exist at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_gnnpipe.chunks.allocator import return_freed_memory
from lightning_gnnpipe.chunks.captured import CapturedChunks, ChunkState, Seeding, SeedOf
from lightning_gnnpipe.chunks.inputs import PassInputs
from lightning_gnnpipe.chunks.step_trace import TraceEvent
from lightning_gnnpipe.chunks.threads import computing_with
from lightning_gnnpipe.codecs import Codecs
from lightning_gnnpipe.comm import Label, Transport
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import BatchPlan, Chunk, ChunkPlan, MicroBatch
from lightning_gnnpipe.layers import NativeContext
from lightning_gnnpipe.passing import MessageContext, replace_attributes
from lightning_gnnpipe.stages import Segment, Stage, Value
from lightning_gnnpipe.types import Phase

_MASK = (1 << 64) - 1
_AHEAD = 2  # a receive is posted this many chunks before its own: a rank has at most 3 open

Piece = Chunk | MicroBatch


@dataclass(frozen=True, slots=True)
class PassSpec:
    """Specification of one pass.

    Attributes:
        stage: This rank's stage.
        plan: The chunks; the one-chunk plan in exact passes over one graph.
        order: The chunks' order in forward; backward takes them in reverse.
        seed_of: None leaves the random stream alone.
        is_training: Whether a backward pass follows.
        recompute: Whether backward recomputes activations.
        codecs: Codecs of messages between stages.
        captured: Runs chunks as CUDA graphs, if asked for.
        saves_memory: Whether memory that chunks have freed goes back to the system.
        by_layer: Whether all chunks run a layer before any runs the next; see `ExactStep`.
        num_threads: Threads to compute with; None: as they are.
    """

    stage: Stage
    outputs: tuple[Value, ...]
    plan: ChunkPlan | BatchPlan
    order: Sequence[int]
    inputs: PassInputs
    context: MessageContext | NativeContext
    transport: Transport
    seed_of: SeedOf | None
    is_training: bool
    recompute: bool
    codecs: Codecs
    saves_memory: bool = False
    captured: CapturedChunks | None = None
    by_layer: bool = False
    num_threads: int | None = None

    def computing(self) -> AbstractContextManager[None]:
        """Compute with `num_threads`."""
        return nullcontext() if self.num_threads is None else computing_with(self.num_threads)


class Step:
    """Runs one rank's part of one pass."""

    def __init__(self, spec: PassSpec) -> None:
        self.spec, self._stage = spec, spec.stage
        spec.context.leaves = spec.inputs
        self._mesh, self._device = spec.transport.mesh, spec.transport.world.device
        self._is_last = self._mesh.is_last
        earlier, later = map(self._rank_of, (self._stage.index - 1, self._stage.index + 1))
        self._sources: dict[Phase, int | None] = {"forward": earlier, "backward": later}
        self._targets: dict[Phase, int | None] = {"forward": later, "backward": earlier}
        self._sent = [self._stage.values[name] for name in self._stage.sent]
        self._expected: dict[Phase, list[Value]] = {
            "forward": [self._stage.values[name] for name in self._stage.received],
            "backward": [value for value in self._sent if value.requires_grad],
        }
        self._unread = unread_after(self._stage.computed, self._stage.sent)
        self._states: dict[int, ChunkState] = {}  # by chunk
        self.captured: CapturedChunks | None = None  # of this step
        self.events: list[TraceEvent] = []

    def forward(self) -> list[Tensor]:
        """Run the forward phase; return the outputs on all ranks, `[num_rows, *]` in user order."""
        spec = self.spec
        numbers = map(spec.inputs.num_places, spec.outputs)
        outputs = list(map(self._empty, numbers, spec.outputs))
        for chunk, received in self._receive("forward", spec.order):
            with self._timed("forward", chunk.index):
                for name, tensor in zip(self._stage.received, received, strict=True):
                    needs_grad = self._stage.values[name].requires_grad
                    tensor.requires_grad_(spec.is_training and needs_grad)
                leaves = spec.inputs.slice(chunk, self._stage.leaves)
                if self.captured is None:
                    state = self._compute(chunk, received, leaves, spec.seed_of)
                else:
                    state = self.captured.forward(chunk, received, leaves, self._compute)
                if self._is_last:
                    for output, value, part in zip(outputs, spec.outputs, state.sent, strict=True):
                        output[spec.inputs.places(chunk, value)] = part.detach()
            if spec.is_training:
                self._states[chunk.index] = state
            self._send("forward", chunk, state.sent)
        masks = None if self._is_last else spec.context.masks
        with nullcontext() if masks is None else masks.waiting("outputs"):
            if self._targets["forward"] is not None:
                spec.transport.flush()
            return self._collect(outputs)

    def backward(self, output_grads: Sequence[Tensor], before_last: Callable[[], None]) -> None:
        """Run backward from `output_grads`, in the user's order; return while sends may still run.

        `before_last` is called once gradients of the last chunk have come.
        """
        spec, order = self.spec, self.spec.order[::-1]
        for chunk, received in self._receive("backward", order):
            if chunk.index == order[-1]:
                before_last()
            with self._timed("backward", chunk.index):
                if self._is_last:
                    pairs = zip(output_grads, spec.outputs, strict=True)
                    grads = [grad[spec.inputs.places(chunk, value)] for grad, value in pairs]
                else:
                    given, none = iter(received), torch.empty(0)
                    grads = [next(given) if one.requires_grad else none for one in self._sent]
                found = self._differentiate(chunk, grads)
            self._send("backward", chunk, found)

    def _compute(
        self,
        chunk: Piece,
        received: Sequence[Tensor],
        leaves: dict[str, Any],
        seed_of: Seeding | None,
    ) -> ChunkState:
        """Compute one chunk; return its inputs and outputs for backward."""
        spec, stage = self.spec, self._stage
        values = leaves | dict(zip(stage.received, received, strict=True))
        given = stage.computed, values, chunk, spec.context, seed_of
        if spec.recompute and spec.is_training:
            run_recomputed(*given, stage.sent)
        else:
            run_segments(*given, self._unread)
        sent = [values[name] for name in stage.sent]
        for value, part in zip(self._sent, sent, strict=True):
            self._check_rows(chunk, value, part)
        return ChunkState(list(received), leaves, sent)

    def _differentiate(self, chunk: Piece, grads: Sequence[Tensor]) -> list[Tensor]:
        """Run autograd from gradients of sent tensors; return gradients of received ones."""
        state = self._states.pop(chunk.index)
        pairs = zip(state.sent, grads, strict=True)
        if roots := [(tensor, grad) for tensor, grad in pairs if tensor.requires_grad]:
            with torch.autocast(self._device.type, enabled=False):
                state.backward([t for t, _ in roots], [g for _, g in roots])
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
                numbers = (self.spec.inputs.num_rows(early, one) for one in self._expected[phase])
                buffers = list(map(self._empty, numbers, self._expected[phase]))
                codec = self.spec.codecs.of(phase)
                transport.post_receive(source, Label(phase, early.index), buffers, codec)
            masks = None if place else self.spec.context.masks  # the first wait is long
            with nullcontext() if masks is None else masks.waiting(phase):
                received = transport.wait_receive(Label(phase, chunk.index))
            yield chunk, received

    def _send(self, phase: Phase, chunk: Piece, tensors: Sequence[Tensor]) -> None:
        """Start to send `tensors` to the neighbour, if there is one."""
        target = self._targets[phase]
        if target is not None:
            codec = self.spec.codecs.of(phase)
            self.spec.transport.send(target, Label(phase, chunk.index), tensors, codec)
        if self.spec.saves_memory:
            return_freed_memory()

    @contextmanager
    def _timed(self, phase: Phase, chunk: int) -> Iterator[None]:
        """Time the block, by the host's clock, as the computation of `chunk`.

        torch's profiler, and Lightning's, show it as a range such as "forward stage 0 chunk 2".
        """
        transport, rank = self.spec.transport, self._mesh.rank
        start, waited = time.perf_counter(), transport.waited_s
        try:
            with record_function(f"{phase} stage {self._stage.index} chunk {chunk}"):
                yield
        finally:
            end, wait_us = time.perf_counter(), 1e6 * (transport.waited_s - waited)
            self.events.append(TraceEvent(rank, phase, chunk, 1e6 * start, 1e6 * end, wait_us))

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

    def _empty(self, num_rows: int, value: Value) -> Tensor:
        return torch.empty(num_rows, *value.row_shape, dtype=value.dtype, device=self._device)

    def _check_rows(self, chunk: Piece, value: Value, part: Tensor) -> None:
        """Raise unless `part` has the shape that the next stage, or the user, expects."""
        shape = self.spec.inputs.num_rows(chunk, value), *value.row_shape
        if part.shape != shape:
            raise UnsupportedError(
                expected=f"a tensor with one row per {value.kind.value} of shape "
                f"{list(shape)} in chunk {chunk.index}",
                found=f"shape {list(part.shape)}",
                remedy="The shape of a row must be the same in every batch. If the model "
                "pools over graphs, give the pooling layer their number: "
                "size=data.num_graphs.",
            )


def run_segments(
    segments: Sequence[Segment],
    values: dict[str, Any],
    chunk: Any,
    context: MessageContext | NativeContext,
    seed_of: Seeding | None = None,
    unread: Sequence[Sequence[str]] = (),
) -> None:
    """Run `segments` over `chunk`, and add their outputs to `values` by name.

    The layers must be intercepted with `context`. If `seed_of` is None, random streams are left
    alone. `unread`: values to drop after each segment, see `unread_after`; by default none.
    """
    masks = None if seed_of is None else context.masks
    try:
        for number, segment in enumerate(segments):
            leaves, inputs = {}, []
            for name in segment.inputs:
                value = values[name]
                is_tensor = isinstance(value, Tensor)
                if segment.has_inplace and is_tensor and value.is_floating_point():
                    value = value.clone()
                inputs.append(value)
                if name.startswith("leaf_"):
                    leaves[name] = value
            if seed_of is not None:
                place = segment.index, chunk.index
                seed = seed_of(*place)
                if masks is None or seed is None:
                    _seed(seed, inputs)
                else:
                    masks.start(place, seed)
            context.enter(chunk, segment.index, leaves)
            outputs = segment.module(*inputs)
            if masks is not None:
                masks.stop()
            values.update(zip(segment.outputs, outputs, strict=True))
            for name in unread[number] if unread else ():
                del values[name]
    finally:
        context.leave()


def unread_after(segments: Sequence[Segment], keep: Collection[str]) -> list[list[str]]:
    """Return for each segment the values that no later one reads, and that are not in `keep`."""
    later, found = set(keep), []
    for segment in reversed(segments):
        named = dict.fromkeys((*segment.inputs, *segment.outputs))
        found.append([name for name in named if name not in later])
        later.update(segment.inputs)
    return found[::-1]


def run_recomputed(
    segments: Sequence[Segment],
    values: dict[str, Any],
    chunk: Any,
    context: MessageContext | NativeContext,
    seed_of: Seeding | None,
    keep: Collection[str],
) -> None:
    """Like `run_segments`, but recompute activations in backward; gradients are the same.

    Backward must run while the layers are intercepted with `context`, on its own random stream.
    """

    def compute(
        group: Sequence[Segment],
        names: list[str],
        outputs: list[str],
        buffers: list[Tensor],
        run: dict[str, bool],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        local = dict(zip(names, tensors, strict=True))
        again = (group, buffers) if run["is_replay"] else ((), ())
        with replace_attributes(context, run), kept_buffers(*again):
            run_segments(group, local, chunk, context, seed_of, unread_after(group, outputs))
        now = [b for s in group for b in s.module.buffers()] if buffers else []
        if not run["is_replay"] and all(map(torch.equal, buffers, now)):
            buffers.clear()
        run["is_replay"] = True
        return tuple(local[name] for name in outputs)

    groups = [[s] for s in segments] if chunk.is_whole else [list(segments)]
    for index, group in enumerate(groups):
        needed = {name for g in groups[index + 1 :] for s in g for name in s.inputs} | set(keep)
        inputs = sorted({n for s in group for n in s.inputs if n in values})
        outputs = sorted({n for s in group for n in s.outputs} & needed)
        buffers = [b.clone() for s in group for b in s.module.buffers()] if chunk.is_whole else []
        first = {"is_replay": False}  # of the context; the first run sets it for the second
        given = group, inputs, outputs, buffers, first, *(values[name] for name in inputs)
        with set_checkpoint_early_stop(False):
            results = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
        values.update(zip(outputs, results, strict=True))
        for name in values.keys() - needed:
            del values[name]


@contextmanager
def kept_buffers(segments: Sequence[Segment], start: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore buffers after the block: the first run has updated running statistics.

    `start`: what the first run began with, as power iterations do; empty if it does not matter.
    """
    kept = [(b, b.clone()) for segment in segments for b in segment.module.buffers()]
    try:
        for (buffer, _), value in zip(kept, start, strict=False):
            buffer.data.copy_(value)
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)  # not a write that autograd detects


def make_seeds(seed: int, step: int, shard: int = 0, replica: int = 0) -> SeedOf:
    """Return the seeds of one step, a function of these arguments, segment and chunk alone.

    So random numbers do not depend on the stage that a layer is assigned to.
    """
    place = (shard, replica) if replica else (shard,) if shard else ()

    first = _mix(0, seed, step)

    def seed_of(segment: int, chunk: int) -> int:
        return _mix(first, segment, chunk, *place) >> 1

    return seed_of


@contextmanager
def own_random_stream(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore the user's random number streams after the block.

    Yields a function that returns whether the block has drawn numbers so far.
    """
    devices = [device] if device.type == "cuda" else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices)]

    with torch.random.fork_rng(devices=devices):
        before = states()
        yield lambda: not all(map(torch.equal, before, states()))


def _seed(seed: int | None, inputs: Sequence[Tensor | int]) -> None:
    if seed is None:  # in a capture: the graph's own generator is seeded before each replay
        return
    torch.default_generator.manual_seed(seed)
    for value in inputs:
        if isinstance(value, Tensor) and value.is_cuda:
            torch.cuda.manual_seed(seed)
            break


def _mix(mixed: int, *numbers: int) -> int:
    """SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators"."""
    for number in numbers:
        x = (mixed + number + 1 + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed = x ^ (x >> 31)
    return mixed
