"""The order in which chunks go through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.types import OrderName


def chunk_order(
    num_chunks: int,
    *,
    epoch: int,
    seed: int,
    order: OrderName,
    leading: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the chunks in the order of the forward phase.

    It depends on the arguments alone, so it is the same on every rank and in every run.
    Source: GNNPipe (arXiv 2308.10087), technique 1, for "shuffled"; "mirrored" is ours.

    Args:
        num_chunks: Chunks, K.
        epoch: Index of the training step.
        seed: Seed of the run.
        order: "shuffled" draws an order for each epoch. "mirrored" draws one for every second
            epoch, and the next goes through it backwards: in each two epochs every chunk reads
            every other stale once. "fixed" is 0, 1, ..., K - 1.
        leading: Chunks that go first, as given here; the others follow in the order drawn.

    Raises:
        ConfigError: If `leading` names a chunk twice, or one that there is not.
    """
    _check_leading(leading, num_chunks)
    rest = _draw(num_chunks, epoch=epoch, seed=seed, order=order)
    return (*leading, *(chunk for chunk in rest if chunk not in leading))


def _draw(num_chunks: int, *, epoch: int, seed: int, order: OrderName) -> list[int]:
    """Return all chunks in the order of the epoch."""
    chunks = list(range(num_chunks))
    if order == "fixed":
        return chunks
    draw = epoch if order == "shuffled" else epoch // 2
    Random(f"chunk order {seed} {draw}").shuffle(chunks)
    return chunks[::-1] if order == "mirrored" and epoch % 2 else chunks


def _check_leading(leading: Sequence[int], num_chunks: int) -> None:
    """Refuse chunks that cannot go first."""
    if len(set(leading)) == len(leading) and set(leading) <= set(range(num_chunks)):
        return
    raise ConfigError(
        explain(
            expected=f"'leading_chunks' to name chunks 0 to {num_chunks - 1}, each once at most",
            found=", ".join(map(str, leading)),
            remedy="Take them from collect_staleness() of a step on the same chunks.",
        )
    )
