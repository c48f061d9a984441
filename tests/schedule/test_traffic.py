from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import (
    Op,
    add_transfers,
    fill_drain,
    graph_parallel_bytes,
    pipeline_bytes,
)
from tests.schedule.text import num_stages, orders


def test_pipeline_bytes() -> None:
    # 3 stages, 10 nodes, h of 4 floats at both cuts and x_0 of 2 at the second, 1 float out
    count = partial(
        pipeline_bytes, num_stages=3, num_nodes=10, row_bytes=[16, 24], output_row_bytes=4
    )
    assert count() == 2 * 10 * (16 + 24) + 2 * 10 * 4
    assert count(backward=False) == 10 * (16 + 24) + 2 * 10 * 4
    # gradients of shared weights go to the first stage, and come back
    assert count(tied_bytes=100) == count() + 200
    assert count(tied_bytes=100, backward=False) == count(backward=False)


def test_one_stage_sends_nothing() -> None:
    assert pipeline_bytes(num_stages=1, num_nodes=10, row_bytes=[], output_row_bytes=4) == 0


@given(num_stages, orders, st.data())
def test_pipeline_bytes_are_those_of_the_sends(
    num_stages: int, order: list[int], data: st.DataObject
) -> None:
    sizes = [data.draw(st.integers(1, 9)) for _ in order]  # nodes of each chunk
    row_bytes = [data.draw(st.integers(1, 99)) for _ in range(num_stages - 1)]
    schedule = add_transfers(fill_drain(num_stages, order))
    sent = 0
    for action in (action for rank in schedule.ranks for action in rank):
        if action.op is Op.SEND_F:
            sent += sizes[action.chunk] * row_bytes[action.stage]
        if action.op is Op.SEND_B:
            sent += sizes[action.chunk] * row_bytes[action.stage - 1]
    assert sent == pipeline_bytes(
        num_stages=num_stages, num_nodes=sum(sizes), row_bytes=row_bytes, output_row_bytes=0
    )


@pytest.mark.parametrize("row_bytes", [[], [1, 1, 1]])
def test_there_is_one_entry_a_cut(row_bytes: list[int]) -> None:
    with pytest.raises(ScheduleError, match="one entry for each of the 2 cuts"):
        pipeline_bytes(num_stages=3, num_nodes=1, row_bytes=row_bytes, output_row_bytes=1)


def test_graph_parallel_bytes() -> None:
    # 7 replicas of 10 nodes: 2 * 4 layers * 7 rows * 16 bytes; ring of 3 shards
    found = graph_parallel_bytes(
        num_layers=4,
        replicas_per_node=0.7,
        num_nodes=10,
        row_bytes=16,
        weight_bytes=100,
        num_shards=3,
    )
    assert found == 2 * 4 * 7 * 16 + 2 * 2 * 100
    assert isinstance(found, int)


def test_one_shard_sends_nothing() -> None:
    sizes = {"num_layers": 4, "num_nodes": 10, "row_bytes": 16, "weight_bytes": 9, "num_shards": 1}
    assert graph_parallel_bytes(**sizes, replicas_per_node=0.0) == 0
