"""The order in which chunks go through the pipeline."""

from __future__ import annotations

from random import Random


def chunk_order(num_chunks: int, *, epoch: int, seed: int, shuffle: bool) -> tuple[int, ...]:
    """Return the chunks in the order of the forward phase.

    It depends on the arguments alone, so it is the same on every rank and in every run.
    Source: GNNPipe (arXiv 2308.10087), technique 1.

    Args:
        num_chunks: Chunks, K.
        epoch: Index of the training step.
        seed: Seed of the run.
        shuffle: Whether to draw a new order for each epoch; otherwise it is 0, 1, ..., K - 1.
    """
    order = list(range(num_chunks))
    if shuffle:
        Random(f"chunk order {seed} {epoch}").shuffle(order)
    return tuple(order)
