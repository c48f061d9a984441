"""Runs layers on one chunk, and again in backward if activations are recomputed.

Random numbers do not depend on the stage that a layer is assigned to. With recomputation, a chunk
keeps only the inputs of the stage, and which of its halo reads were stale. If the whole graph is
one chunk, layers are recomputed one at a time, so that not all activations exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_gnnpipe.chunks.inputs import PassInputs
from lightning_gnnpipe.codecs import Codecs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.graph import BatchPlan, Chunk, ChunkPlan, MicroBatch
from lightning_gnnpipe.layers import NativeContext, find_convs
from lightning_gnnpipe.passing import MessageContext, Tape
from lightning_gnnpipe.stages import Segment, Stage, Value, line_of_node, strip_root

_MASK = (1 << 64) - 1

SeedOf = Callable[[int, int], int]


def run_segments(
    segments: Sequence[Segment],
    values: dict[str, Any],
    chunk: Any,
    context: MessageContext | NativeContext,
    seed_of: SeedOf | None = None,
    keep: Collection[str] | None = None,
) -> None:
    """Run `segments` over `chunk`, and add their outputs to `values` by name.

    The layers must be intercepted with `context`. If `seed_of` is None, random streams are left
    alone. Values that are not in `keep` are dropped after their last use; None keeps all.
    """
    last_use = {name: segment.index for segment in segments for name in segment.inputs}
    try:
        for segment in segments:
            inputs = [values[name] for name in segment.inputs]
            if segment.has_inplace:
                inputs = [
                    t.clone() if isinstance(t, Tensor) and t.is_floating_point() else t
                    for t in inputs
                ]
            if seed_of is not None:
                _seed(seed_of(segment.index, chunk.index), inputs)
            named = zip(segment.inputs, inputs, strict=True)
            leaves = {name: tensor for name, tensor in named if name.startswith("leaf_")}
            context.enter(chunk, segment.index, leaves)
            outputs = segment.module(*inputs)
            values.update(zip(segment.outputs, outputs, strict=True))
            last = {name for name in values if last_use.get(name, -1) <= segment.index}
            for name in () if keep is None else last.difference(keep):
                del values[name]
    finally:
        context.leave()


def make_seeds(seed: int, step: int, shard: int = 0, replica: int = 0) -> SeedOf:
    """Return the seeds of one step, a function of these arguments, segment and chunk alone."""
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


def _seed(seed: int, inputs: Sequence[Tensor | int]) -> None:
    torch.default_generator.manual_seed(seed)
    if any(isinstance(value, Tensor) and value.is_cuda for value in inputs):
        torch.cuda.manual_seed(seed)


def _mix(mixed: int, *numbers: int) -> int:
    """SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators"."""
    for number in numbers:
        x = (mixed + number + 1 + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed = x ^ (x >> 31)
    return mixed


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


def run_recomputed(
    segments: Sequence[Segment],
    values: dict[str, Any],
    chunk: Any,
    context: MessageContext | NativeContext,
    seed_of: SeedOf | None,
    keep: Collection[str],
) -> None:
    """Like `run_segments`, but recompute activations in backward; gradients are the same.

    Backward must run while the layers are intercepted with `context`, on its own random stream.
    """

    def compute(
        group: Sequence[Segment], names: list[str], outputs: list[str], tape: Tape, *tensors: Any
    ) -> tuple[Tensor, ...]:
        local = dict(zip(names, tensors, strict=True))
        with context.taped(tape), _kept_buffers(group if tape.is_replay else ()):
            run_segments(group, local, chunk, context, seed_of, outputs)
        tape.is_replay = True
        return tuple(local[name] for name in outputs)

    groups = [[s] for s in segments] if chunk.is_whole else [list(segments)]
    for index, group in enumerate(groups):
        needed = {name for g in groups[index + 1 :] for s in g for name in s.inputs} | set(keep)
        inputs = sorted({n for s in group for n in s.inputs if n in values})
        outputs = sorted({n for s in group for n in s.outputs} & needed)
        given = group, inputs, outputs, Tape(), *(values[name] for name in inputs)
        with set_checkpoint_early_stop(False):
            results = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
        values.update(zip(outputs, results, strict=True))
        for name in values.keys() - needed:
            del values[name]


@contextmanager
def _kept_buffers(segments: Sequence[Segment]) -> Iterator[None]:
    """Restore buffers after the block: the first run has updated running statistics."""
    kept = [(b, b.clone()) for segment in segments for b in segment.module.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)  # not a write that autograd detects


class LayerNames:
    """Names the message-passing layers of `module` in a segment."""

    def __init__(self, module: nn.Module) -> None:
        self._convs = {id(conv): name for name, conv in find_convs(module).items()}

    def of(self, segment: Segment) -> str:
        """Return the names of the message-passing layers in `segment`, else its number."""
        names = [self._convs[id(m)] for m in segment.module.modules() if id(m) in self._convs]
        return ", ".join(dict.fromkeys(names)) or f"layer {segment.index}"

    @staticmethod
    def of_repeated(part: Segment) -> tuple[str, ...]:
        """Return the names of modules with weights in a recomputed part, else its source lines."""
        names = [strip_root(name) for name, _ in part.module.named_parameters()]
        owners = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
        lines = (line_of_node(end).partition(",")[0] for end in part.ends.values())
        return tuple(owners) or tuple(dict.fromkeys(lines))
