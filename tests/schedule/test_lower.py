"""Sends and receives in the lists; which sends have arrived when a rank computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.schedule import (
    Action,
    Op,
    Schedule,
    add_transfers,
    arrived_sends,
    check,
    fill_drain,
    interleaved,
    simulate,
)
from tests.helpers.cases import some
from tests.schedule.shapes import SHAPES, build_all, num_stages, orders, random_cost, write


def test_transfers_without_lookahead() -> None:
    assert write(add_transfers(fill_drain(3, (1, 0)), lookahead=0)) == [
        "0F1 0SEND_F1 0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1F1 1SEND_F1 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
        "2RECV_F1 2F1 2RECV_F0 2F0 2B0 2SEND_B0 2B1 2SEND_B1",
    ]


def test_receives_are_posted_ahead_but_not_before_their_phase() -> None:
    schedule = fill_drain(2, (0, 1, 2, 3), backward=False)
    assert write(add_transfers(schedule, lookahead=1)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1RECV_F3 1F2 1F3",
    ]
    assert write(add_transfers(schedule))[1] == (
        "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1RECV_F3 1F1 1F2 1F3"
    )
    assert write(add_transfers(fill_drain(2, (0, 1)), lookahead=9))[0] == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0"
    )


@given(num_stages, orders, st.booleans(), st.integers(0, 5))
def test_lowered_lists_are_the_built_ones_with_transfers_in_their_place(
    num_stages: int, order: list[int], backward: bool, lookahead: int
) -> None:
    built = fill_drain(num_stages, order, backward=backward)
    schedule = add_transfers(built, lookahead=lookahead)
    check(built)
    check(schedule)
    kept = tuple(tuple(each for each in rank if each.op.is_compute) for rank in schedule.ranks)
    assert kept == built.ranks
    for stage, rank in enumerate(schedule.ranks):
        for i, action in enumerate(rank):
            if action.op.is_send:
                assert rank[i - 1] == action.served
        cuts = [(Op.F, Op.RECV_F, stage > 0), (Op.B, Op.RECV_B, stage < num_stages - 1)]
        for op, receive, has_cut in cuts:
            computes = [each for each in rank if each.op is op] if has_cut else []
            for i, compute in enumerate(computes):
                posted = rank.index(Action(stage, receive, compute.chunk))
                before = computes[max(0, i - lookahead)]
                assert posted < rank.index(before), f"posted before {before}"
                if i > lookahead:
                    assert posted > rank.index(computes[i - lookahead - 1]), "and not earlier"


@pytest.mark.parametrize("seed", some(range(3), every=3))
def test_a_send_is_named_once_when_its_receiver_has_computed_at_any_cost(seed: int) -> None:
    for shape in SHAPES:
        for built in build_all(*shape):
            schedule = add_transfers(built)
            timeline = simulate(schedule, cost=random_cost(seed), latency=0.5)
            events = {event.action: event for event in timeline.events}
            for rank, actions in enumerate(schedule.ranks):
                place = {action: i for i, action in enumerate(actions)}
                arrived = arrived_sends(schedule, rank)
                named = [(send, at) for at, sends in arrived.items() for send in sends]
                assert len({send for send, _ in named}) == len(named)
                for send, at in named:
                    assert at.op.is_compute and place[send] < place[at]
                    waiting = events[send.partner.served]
                    assert events[send].end <= waiting.start
                    assert waiting.end <= events[at].start


def most_kept(schedule: Schedule, rank: int) -> int:
    """Return the largest number of sends that have not been named."""
    kept = most = 0
    arrived = arrived_sends(schedule, rank)
    for action in schedule.ranks[rank]:
        kept += action.op.is_send
        most = max(most, kept)
        kept -= len(arrived.get(action, ()))
    return most


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_is_kept_does_not_grow_with_the_number_of_micro_batches(num_ranks: int) -> None:
    for num_virtual in (1, 2):
        few, many = (
            add_transfers(interleaved(num_ranks, num_virtual, number * num_ranks))
            for number in (4, 40)
        )
        for rank in range(num_ranks):
            assert most_kept(few, rank) == most_kept(many, rank)
