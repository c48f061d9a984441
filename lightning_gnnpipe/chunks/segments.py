"""Runs layers on one chunk, and again in backward if activations are recomputed.

Random numbers do not depend on the stage that a layer is assigned to. With recomputation, a chunk
keeps only the inputs of the stage, and which of its halo reads were stale. If the whole graph is
one chunk, layers are recomputed one at a time, so that not all activations exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_gnnpipe.layers import NativeContext
from lightning_gnnpipe.passing import MessageContext, Tape
from lightning_gnnpipe.stages import Segment

_MASK = (1 << 64) - 1

SeedOf = Callable[[int, int], int]


def run_segments(
    segments: Sequence[Segment],
    values: dict[str, Any],
    chunk: Any,
    context: MessageContext | NativeContext,
    seed_of: SeedOf | None = None,
    unread: Sequence[Sequence[str]] = (),
) -> None:
    """Run `segments` over `chunk`, and add their outputs to `values` by name.

    The layers must be intercepted with `context`. If `seed_of` is None, random streams are left
    alone. `unread`: values to drop after each segment, see `unread_after`; by default none.
    """
    try:
        for place, segment in enumerate(segments):
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
                _seed(seed_of(segment.index, chunk.index), inputs)
            context.enter(chunk, segment.index, leaves)
            outputs = segment.module(*inputs)
            values.update(zip(segment.outputs, outputs, strict=True))
            for name in unread[place] if unread else ():
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
            run_segments(group, local, chunk, context, seed_of, unread_after(group, outputs))
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
