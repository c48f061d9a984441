"""Seconds of layouts, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gnnpipe.planning import LayoutWork, Link, factorize, time_layout

# 2 stages, 4 chunks: a chunk takes 3 s forward and backward.
WORK = LayoutWork(
    num_chunks=4,
    compute_s=[12.0, 12.0],
    halo_bytes=[0, 0],
    num_messages=[0, 0],
    cut_bytes=[0],
    link=Link(100.0, 0.0),
)


def step_s(**changes: Any) -> float:
    return time_layout(replace(WORK, **changes))[0]


def test_the_slowest_stage_fills_and_drains() -> None:
    assert step_s() == (4 + 1) * 3
    assert time_layout(WORK)[1] == pytest.approx(1 / 5)
    assert step_s(compute_s=[16.0, 12.0]) == (4 + 1) * 4
    assert step_s(num_chunks=1) == 2 * 12


def test_an_exchange_holds_up_each_chunk_unless_it_is_asynchronous() -> None:
    halo = {"halo_bytes": [2400, 2400]}  # 24 s
    assert step_s(**halo) == (4 + 1) * (3 + 6)
    assert time_layout(replace(WORK, **halo))[1] == pytest.approx(1 - 12 / 45)
    assert step_s(**halo, waits_for_halo=False) == 24  # as long as the link takes
    assert step_s(**halo, waits_for_halo=False, link=Link(1e6, 0.0)) == (4 + 1) * 3


def test_a_message_takes_time_whatever_its_size() -> None:
    """Across a cut it is late once; exchanges hold up a stage.

    Several ranks, which send each other the outputs, agree in five messages.
    """
    link, late = Link(100.0, 0.25), 2 * 0.25
    assert step_s(link=link) == (4 + 1) * 3 + late
    assert step_s(link=link, num_messages=[8, 8]) == (4 + 1) * (3 + 0.5) + late
    assert step_s(link=link, num_rounds=2) == step_s(link=link) + (2 + 5) * 0.25
    alone = {"compute_s": [12], "halo_bytes": [0], "num_messages": [0], "cut_bytes": []}
    assert step_s(link=link, taken_s=0.1, **alone) == 12
    assert step_s(taken_s=0.1) == step_s() + 4 * 0.1


def test_a_slow_cut_sets_the_pace() -> None:
    assert step_s(cut_bytes=[2000]) == 3 + 4 * 5 + 3


def test_outputs_and_weights_come_on_top() -> None:
    more = {"output_bytes": 300, "num_rounds": 2, "weight_bytes": 700}
    assert step_s(**more) == step_s() + 2 * 3 + 7


def test_one_rank_sends_nothing() -> None:
    one = {"compute_s": [12.0], "halo_bytes": [0], "num_messages": [0], "cut_bytes": []}
    assert step_s(**one, output_bytes=1000) == 12


def test_ranks_share_cores() -> None:
    assert step_s(stages_at_once=2) == step_s()
    assert step_s(stages_at_once=1) == 12 + 12
    assert step_s(stages_at_once=0.5) == 2 * (12 + 12)  # two shards on one core


def test_exchanges_may_be_slower_than_cuts() -> None:
    link = Link(100.0, 0.0, exchange_bytes_per_s=50.0)
    assert step_s(link=link, cut_bytes=[2000]) == step_s(cut_bytes=[2000])
    assert step_s(link=link, halo_bytes=[2400, 2400]) == step_s(halo_bytes=[4800, 4800])
    assert str(Link(1.25e9, 1e-3, 1.25e8)) == "10 Gbit/s (1 between shards) and 1000 us per message"
    assert str(Link(1.25e9, 1e-3)) == "10 Gbit/s and 1000 us per message"


def test_factorisations() -> None:
    assert factorize(12, most_stages=5) == ((1, 12), (2, 6), (3, 4), (4, 3))
    assert factorize(7, most_stages=6) == ((1, 7),)
    assert factorize(1, most_stages=6) == ((1, 1),)
