from __future__ import annotations

import subprocess
import sys

from lightning_gnnpipe.graph import chunk_order


def test_without_shuffle_the_order_is_the_identity() -> None:
    assert chunk_order(4, epoch=3, seed=7, order="fixed") == (0, 1, 2, 3)


def test_each_epoch_draws_a_fresh_permutation() -> None:
    orders = [chunk_order(8, epoch=epoch, seed=0, order="shuffled") for epoch in range(20)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(orders)) == 20


def test_the_order_depends_on_seed_and_epoch_separately() -> None:
    orders = {chunk_order(8, epoch=e, seed=s, order="shuffled") for e in range(8) for s in range(8)}
    assert len(orders) == 64


def test_another_python_run_draws_the_same_order() -> None:
    code = (
        "from lightning_gnnpipe.graph import chunk_order;"
        "import sys; sys.stdout.write(str(chunk_order(8, epoch=5, seed=1, order='shuffled')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == str(chunk_order(8, epoch=5, seed=1, order="shuffled"))
