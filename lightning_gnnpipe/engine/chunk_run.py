"""Running segments over one chunk.

Their random numbers do not depend on how layers are dealt out to stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.passing import MessageContext, NativeContext
from lightning_gnnpipe.stages import Segment

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
    """Run `segments` on `values` over `chunk`; what they compute is added to `values`.

    Args:
        segments: Layers, or parts of them, in order.
        values: The chunk's leaves and what crossed the cut before the first segment, by name.
        chunk: The chunk, or micro-batch.
        context: Serves the layers' message passing; the layers must be intercepted with it.
        seed_of: Maps (segment, chunk) to the seed of the segment's random numbers; None leaves the
            stream alone.
        keep: Names of the values that are needed afterwards; the others are dropped after their
            last use. None keeps all.
    """
    last_use = {name: segment.index for segment in segments for name in segment.inputs}
    for segment in segments:
        inputs = [values[name] for name in segment.inputs]
        if segment.has_inplace:
            inputs = [t.clone() if _is_real(t) else t for t in inputs]
        if seed_of is not None:
            _seed(seed_of(segment.index, chunk.index), inputs)
        named = zip(segment.inputs, inputs, strict=True)
        leaves = {name: tensor for name, tensor in named if name.startswith("leaf_")}
        context.enter(chunk, segment.index, leaves)
        outputs = segment.module(*inputs)
        values.update(zip(segment.outputs, outputs, strict=True))
        if keep is not None:
            for name in [
                n for n in values if n not in keep and last_use.get(n, -1) <= segment.index
            ]:
                del values[name]
    context.leave()


def make_seeds(seed: int, step: int, shard: int = 0, replica: int = 0) -> SeedOf:
    """Return the seeds of one training step.

    They depend on (seed, step, segment, chunk, shard, replica), and on nothing else.
    """
    place = (shard, replica) if replica else (shard,) if shard else ()

    def seed_of(segment: int, chunk: int) -> int:
        mixed = 0
        for number in (seed, step, segment, chunk, *place):
            mixed = _split_mix((mixed + number + 1) & _MASK)
        return mixed >> 1

    return seed_of


@contextmanager
def own_random_stream(device: torch.device) -> Iterator[None]:
    """Leave the user's random number streams as they are."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def _is_real(value: Tensor | int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _seed(seed: int, inputs: Sequence[Tensor | int]) -> None:
    torch.default_generator.manual_seed(seed)
    if any(isinstance(value, Tensor) and value.is_cuda for value in inputs):
        torch.cuda.manual_seed(seed)


def _split_mix(x: int) -> int:
    """One step of SplitMix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators".
    """
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
