"""What has arrived when a rank computes has arrived whatever the actions cost."""

from __future__ import annotations

import pytest

from lightning_gnnpipe.schedule import (
    Action,
    Op,
    Schedule,
    add_transfers,
    arrived_sends,
    interleaved,
    one_f_one_b,
    simulate,
)
from tests.helpers.cases import some
from tests.schedule.shapes import SHAPES, build_all, random_cost


def consumer(send: Action) -> Action:
    """Return the compute action that waits for what `send` sends."""
    return send.partner.served


@pytest.mark.parametrize("seed", some(range(3), every=3))
def test_a_send_is_named_when_its_receiver_has_computed(seed: int) -> None:
    for shape in SHAPES:
        for built in build_all(*shape):
            schedule = add_transfers(built)
            timeline = simulate(schedule, cost=random_cost(seed), latency=0.5)
            events = {event.action: event for event in timeline.events}
            for rank in range(schedule.num_ranks):
                for action, sends in arrived_sends(schedule, rank).items():
                    assert action.op.is_compute
                    for send in sends:
                        assert events[send].end <= events[consumer(send)].start
                        assert events[consumer(send)].end <= events[action].start


def test_no_send_is_named_twice_or_before_it_is_made() -> None:
    for shape in SHAPES:
        for built in build_all(*shape):
            schedule = add_transfers(built)
            for rank, actions in enumerate(schedule.ranks):
                place = {action: i for i, action in enumerate(actions)}
                arrived = arrived_sends(schedule, rank)
                named = [(send, at) for at, sends in arrived.items() for send in sends]
                assert len({send for send, _ in named}) == len(named)
                assert all(place[send] < place[at] for send, at in named)


def most_kept(schedule: Schedule, rank: int) -> int:
    """Return the largest number of sends that have not been named."""
    kept = most = 0
    arrived = arrived_sends(schedule, rank)
    for action in schedule.ranks[rank]:
        kept += action.op in (Op.SEND_F, Op.SEND_B)
        most = max(most, kept)
        kept -= len(arrived.get(action, ()))
    return most


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_is_kept_does_not_grow_with_the_number_of_micro_batches(num_ranks: int) -> None:
    for make in (
        lambda number: one_f_one_b(num_ranks, number),
        lambda number: interleaved(num_ranks, 2, number),
    ):
        few, many = (add_transfers(make(number * num_ranks)) for number in (4, 40))
        for rank in range(num_ranks):
            assert most_kept(few, rank) == most_kept(many, rank)


def test_one_rank_sends_nothing() -> None:
    assert arrived_sends(add_transfers(one_f_one_b(1, 4)), 0) == {}
