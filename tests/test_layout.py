from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_gnnpipe.planning import LayoutWork, factorize, simulate_layout

# 2 stages of 2 shards, 4 equal chunks: all takes whole numbers of seconds.
WORK = LayoutWork(
    num_shards=2,
    forward_s=[8.0, 8.0],
    backward_s=[16.0, 16.0],
    halo_row_bytes=[0, 0],
    num_exchanges=[1, 1],
    cut_bytes=[[0] * 4],
    cut_grad_bytes=[[0] * 4],
    work_fracs=[1 / 8] * 4,
    halo_rows=[3] * 4,
    halo_peers=[1] * 4,
    weight_bytes=[0, 0],
    output_bytes=0,
    loss_s=0.0,
    bytes_per_s=100.0,
    message_s=0.0,
    copied_bytes_per_s=math.inf,
)


def step_s(**changes: Any) -> float:
    return simulate_layout(replace(WORK, **changes)).step_s


def test_shards_divide_the_work_and_stages_fill_and_drain() -> None:
    assert step_s() == (4 + 1) * (1 + 2)
    assert simulate_layout(WORK).bubble_frac == pytest.approx(1 / 5)


def test_an_exchange_holds_up_each_chunk_unless_it_is_asynchronous() -> None:
    halo = {"halo_row_bytes": [100, 100]}  # 3 s a chunk, forward and backward
    assert step_s(**halo) == (4 + 1) * (1 + 3 + 2 + 3)
    assert simulate_layout(replace(WORK, **halo)).bubble_frac == pytest.approx((9 + 4 * 6) / 45)
    assert step_s(**halo, waits_for_halo=False) == 2 * 4 * 3  # as long as the link takes
    assert step_s(**halo, waits_for_halo=False, bytes_per_s=1e6) == (4 + 1) * (1 + 2)


def test_rows_are_gathered_and_put_down_by_the_rank_itself() -> None:
    copied = {"halo_row_bytes": [100, 100], "bytes_per_s": 1e30, "copied_bytes_per_s": 150.0}
    assert step_s(**copied) == step_s(**copied, waits_for_halo=False) == (4 + 1) * (1 + 2 + 2 + 2)
    assert simulate_layout(replace(WORK, **copied)).bubble_frac == pytest.approx(1 / 5)


def test_a_message_takes_time_whatever_its_size() -> None:
    """Across a cut it is late once; in exchanges there is one for each other shard."""
    alone = replace(WORK, num_exchanges=[0, 0])
    times = simulate_layout(replace(alone, message_s=0.25))
    assert times.pipeline_s == (4 + 1) * (1 + 2) + 2 * 0.25
    assert (times.output_s, times.weight_s) == (2 * 2 * 0.25, 2 * 0.25)
    several = replace(WORK, num_exchanges=[2, 2], halo_peers=[3] * 4, message_s=0.25)
    exchange_s = 2 * 3 * 0.25
    expected = (4 + 1) * (1 + exchange_s + 2 + exchange_s) + 2 * 0.25
    assert simulate_layout(several).pipeline_s == expected


def test_a_slow_cut_sets_the_pace() -> None:
    assert step_s(cut_bytes=[[500] * 4]) == (1 + 4 * 5 + 1) + (4 + 1) * 2
    assert step_s(cut_grad_bytes=[[500] * 4]) == (4 + 1) * 1 + (2 + 4 * 5 + 2)


def test_outputs_weights_and_loss_come_on_top() -> None:
    times = simulate_layout(replace(WORK, output_bytes=300, weight_bytes=[100, 700], loss_s=0.5))
    assert times.output_s == 2 * 3  # to 4 ranks in two rounds
    assert times.weight_s == 7  # 2 (G - 1) / G of those of the larger stage
    assert times.step_s == step_s() + 6 + 7 + 0.5


def test_gradients_of_shared_weights_go_along_the_pipe_and_back() -> None:
    tied = replace(WORK, tied_bytes=300.0, num_ties=2, message_s=0.25)
    own_s = simulate_layout(replace(WORK, message_s=0.25)).weight_s
    assert simulate_layout(tied).weight_s == own_s + 2 * (2 * 0.25 + 3)


def test_one_rank_sends_nothing() -> None:
    work = {"num_shards": 1, "forward_s": [8.0], "backward_s": [16.0], "work_fracs": [1 / 4] * 4}
    halo = {"halo_row_bytes": [100], "halo_rows": [0] * 4}
    rest = {"cut_bytes": [], "cut_grad_bytes": [], "weight_bytes": [1000], "output_bytes": 1000}
    assert step_s(**work, **halo, **rest) == 24


def test_factorisations() -> None:
    assert factorize(12, most_stages=5) == ((1, 12), (2, 6), (3, 4), (4, 3))
    assert factorize(7, most_stages=6) == ((1, 7),)
    assert factorize(1, most_stages=6) == ((1, 1),)
