"""Running segments without keeping their activations: they are computed again in backward.

Of a chunk, what crosses the cut before the stage is kept, and what it read of other chunks. Where
the whole graph is one chunk that would hold all activations of the stage at once in backward, so
there each layer's inputs are kept instead, and one layer at a time is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_gnnpipe.engine.chunk_run import SeedOf, run_segments
from lightning_gnnpipe.passing import MessageContext, NativeContext, Tape
from lightning_gnnpipe.stages import Segment


def run_recomputed(
    segments: Sequence[Segment],
    values: dict[str, Any],
    chunk: Any,
    context: MessageContext | NativeContext,
    seed_of: SeedOf | None,
    keep: Collection[str],
) -> None:
    """Do what `run_segments` does; gradients are the same.

    Backward must run while the layers are intercepted with `context`, on its own random stream.
    """
    groups = [[s] for s in segments] if chunk.is_whole else [list(segments)]
    for index, group in enumerate(groups):
        later = {name for g in groups[index + 1 :] for s in g for name in s.inputs}
        needed = later | set(keep)
        _run_group(group, values, chunk, context, seed_of, needed)
        for name in values.keys() - needed:
            del values[name]


def _run_group(
    group: Sequence[Segment],
    values: dict[str, Any],
    chunk: Any,
    context: MessageContext | NativeContext,
    seed_of: SeedOf | None,
    needed: Collection[str],
) -> None:
    own = {name for segment in group for name in segment.outputs}
    inputs = sorted({n for segment in group for n in segment.inputs if n in values})
    outputs = sorted(own & set(needed))
    tape = Tape()

    def compute(*tensors: Any) -> tuple[Tensor, ...]:
        local = dict(zip(inputs, tensors, strict=True))
        with context.taped(tape), _kept_buffers(group if tape.is_replay else ()):
            run_segments(group, local, chunk, context, seed_of, outputs)
        tape.is_replay = True
        return tuple(local[name] for name in outputs)

    with set_checkpoint_early_stop(False):
        results = checkpoint(
            compute,
            *(values[name] for name in inputs),
            use_reentrant=False,
            preserve_rng_state=False,
        )
    values.update(zip(outputs, results, strict=True))


@contextmanager
def _kept_buffers(segments: Sequence[Segment]) -> Iterator[None]:
    """Leave running statistics and the like as they are: the first run has counted."""
    kept = [(b, b.clone()) for segment in segments for b in segment.module.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)  # not a write that autograd would object to
