"""The order in which chunks go through the pipeline."""

from __future__ import annotations

from random import Random

from lightning_gnnpipe.types import OrderName


def chunk_order(num_chunks: int, *, epoch: int, seed: int, order: OrderName) -> tuple[int, ...]:
    """Return the chunks in the order of the forward phase.

    It depends on the arguments alone, so it is the same on every rank and in every run.
    Source: GNNPipe (arXiv 2308.10087), technique 1, for "shuffled".

    Args:
        num_chunks: Chunks, K.
        epoch: Index of the training step.
        seed: Seed of the run.
        order: "shuffled" draws an order for each epoch. "fixed" is 0, 1, ..., K - 1.
    """
    chunks = list(range(num_chunks))
    if order == "shuffled":
        Random(f"chunk order {seed} {epoch}").shuffle(chunks)
    return tuple(chunks)
