"""The order of chunks, stated again: the package's own function would be its own oracle."""

from __future__ import annotations

from random import Random


def order_of_step(num_chunks: int, step: int, seed: int) -> tuple[int, ...]:
    """Return the chunks in the order in which training step `step` runs them."""
    chunks = list(range(num_chunks))
    Random(f"chunk order {seed} {step}").shuffle(chunks)
    return tuple(chunks)
