from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.types import OrderName


def test_without_shuffle_the_order_is_the_identity() -> None:
    assert chunk_order(4, epoch=3, seed=7, order="fixed") == (0, 1, 2, 3)


def test_each_epoch_draws_a_fresh_permutation() -> None:
    orders = [chunk_order(8, epoch=epoch, seed=0, order="shuffled") for epoch in range(20)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(orders)) == 20


def test_a_mirrored_order_goes_back_every_second_epoch() -> None:
    """Of any two chunks each comes first once in two epochs."""
    orders = [chunk_order(8, epoch=epoch, seed=0, order="mirrored") for epoch in range(20)]
    assert all(there == back[::-1] for there, back in zip(orders[::2], orders[1::2], strict=True))
    assert len(set(orders)) == 20


def test_the_order_depends_on_seed_and_epoch_separately() -> None:
    orders = {chunk_order(8, epoch=e, seed=s, order="shuffled") for e in range(8) for s in range(8)}
    assert len(orders) == 64


@pytest.mark.parametrize("order", ["shuffled", "mirrored", "fixed"])
@pytest.mark.parametrize("leading", [(), (3,), (4, 0), (1, 2, 0, 4, 3)])
def test_leading_chunks_go_first_and_the_others_as_drawn(
    order: OrderName, leading: tuple[int, ...]
) -> None:
    for epoch in range(6):
        drawn = chunk_order(5, epoch=epoch, seed=0, order=order)
        found = chunk_order(5, epoch=epoch, seed=0, order=order, leading=leading)
        assert found[: len(leading)] == leading
        assert [c for c in drawn if c not in leading] == list(found[len(leading) :])


@pytest.mark.parametrize("leading", [(2, 2), (5,), (0, -1)])
def test_chunks_that_cannot_lead_are_refused(leading: tuple[int, ...]) -> None:
    match = r"'leading_chunks' to name chunks 0 to 4, each once at most \(got " + str(leading[0])
    with pytest.raises(ConfigError, match=match):
        chunk_order(5, epoch=0, seed=0, order="shuffled", leading=leading)


def test_another_python_run_draws_the_same_order() -> None:
    code = (
        "from lightning_gnnpipe.graph import chunk_order;"
        "import sys; sys.stdout.write(str(chunk_order(8, epoch=5, seed=1, order='shuffled')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == str(chunk_order(8, epoch=5, seed=1, order="shuffled"))
