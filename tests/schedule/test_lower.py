from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import Action, Op, Schedule, add_transfers, check, fill_drain
from tests.schedule.text import num_stages, orders, write


@st.composite
def lowered(draw: st.DrawFn) -> tuple[Schedule, int]:
    """Draw a lowered schedule and its lookahead."""
    lookahead = draw(st.integers(0, 5))
    built = fill_drain(draw(num_stages), draw(orders), backward=draw(st.booleans()))
    return add_transfers(built, lookahead=lookahead), lookahead


def test_transfers_without_lookahead() -> None:
    assert write(add_transfers(fill_drain(3, (1, 0)), lookahead=0)) == [
        "0F1 0SEND_F1 0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1F1 1SEND_F1 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
        "2RECV_F1 2F1 2RECV_F0 2F0 2B0 2SEND_B0 2B1 2SEND_B1",
    ]


def test_receives_are_posted_ahead() -> None:
    schedule = fill_drain(2, (0, 1, 2, 3), backward=False)
    assert write(add_transfers(schedule, lookahead=1)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1RECV_F3 1F2 1F3",
    ]
    assert write(add_transfers(schedule))[1] == (
        "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1RECV_F3 1F1 1F2 1F3"
    )


def test_receives_of_the_backward_stay_behind_the_forward() -> None:
    assert write(add_transfers(fill_drain(2, (0, 1)), lookahead=9))[0] == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0"
    )


@given(orders)
def test_one_stage_has_no_transfers(order: list[int]) -> None:
    assert add_transfers(fill_drain(1, order)) == fill_drain(1, order)


@given(lowered())
def test_check_passes_for_all_that_is_lowered(case: tuple[Schedule, int]) -> None:
    check(case[0])


@given(lowered())
def test_no_compute_waits_for_a_receive_that_is_not_posted(case: tuple[Schedule, int]) -> None:
    schedule, lookahead = case
    last = schedule.num_stages - 1
    for stage, rank in enumerate(schedule.ranks):
        for op, receive, has_cut in [(Op.F, Op.RECV_F, stage > 0), (Op.B, Op.RECV_B, stage < last)]:
            computes = [each for each in rank if each.op is op] if has_cut else []
            for i, compute in enumerate(computes):
                posted = rank.index(Action(stage, receive, compute.chunk))
                before = computes[max(0, i - lookahead)]
                assert posted < rank.index(before), f"posted before {before}"
                if i > lookahead:
                    assert posted > rank.index(computes[i - lookahead - 1]), "and not earlier"


@given(lowered())
def test_sends_follow_what_they_send(case: tuple[Schedule, int]) -> None:
    for rank in case[0].ranks:
        for i, action in enumerate(rank):
            if action.op in (Op.SEND_F, Op.SEND_B):
                op = Op.F if action.op is Op.SEND_F else Op.B
                assert rank[i - 1] == Action(action.stage, op, action.chunk)


@given(lowered())
def test_lowering_only_adds(case: tuple[Schedule, int]) -> None:
    schedule, _ = case
    built = fill_drain(schedule.num_stages, schedule.order, backward=schedule.has_backward)
    kept = tuple(tuple(each for each in rank if each.op.is_compute) for rank in schedule.ranks)
    assert kept == built.ranks


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Expected 'lookahead' to be 0 or more \(got -1\)"):
        add_transfers(fill_drain(2, (0,)), lookahead=-1)


def test_lowering_twice_is_refused() -> None:
    with pytest.raises(ScheduleError, match="Call 'add_transfers' only once"):
        add_transfers(add_transfers(fill_drain(2, (0,))))
