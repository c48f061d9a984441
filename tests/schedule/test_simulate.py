from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import Action, Op, Timeline, add_transfers, fill_drain, simulate
from tests.schedule.text import num_stages, orders, read


def spell(timeline: Timeline) -> list[str]:
    """Return the events as text."""
    return [f"{each.action} {each.start:g}-{each.end:g}" for each in timeline.events]


def slow_link(action: Action) -> float:
    """Return 1 for computing, 3 for a transfer."""
    return 1.0 if action.op.is_compute else 3.0


@given(num_stages, orders, st.booleans(), st.booleans())
def test_the_bubble_of_fill_drain(
    num_stages: int, order: list[int], backward: bool, transfers: bool
) -> None:
    schedule = fill_drain(num_stages, order, backward=backward)
    timeline = simulate(add_transfers(schedule) if transfers else schedule)
    num_steps = len(order) + num_stages - 1
    assert timeline.bubble_frac == (num_stages - 1) / num_steps
    assert timeline.span == (2 if backward else 1) * num_steps
    assert timeline.peak_live == (len(order),) * num_stages


def test_events() -> None:
    assert spell(simulate(fill_drain(2, (1, 0)))) == [
        "0F1 0-1",
        "0F0 1-2",
        "1F1 1-2",
        "1F0 2-3",
        "1B0 3-4",
        "0B0 4-5",
        "1B1 4-5",
        "0B1 5-6",
    ]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    schedule = add_transfers(fill_drain(2, (0, 1), backward=False))
    assert spell(simulate(schedule, cost=slow_link)) == [
        "0F0 0-1",
        "1RECV_F0 0-4",  # posted at 0, arrived at 4
        "1RECV_F1 0-7",
        "0F1 1-2",
        "0SEND_F0 1-4",
        "0SEND_F1 4-7",  # started at 2, the link was free at 4
        "1F0 4-5",
        "1F1 7-8",
    ]


def test_a_transfer_waits_for_its_receive() -> None:
    schedule = add_transfers(fill_drain(2, (0, 1), backward=False), lookahead=0)
    timeline = simulate(schedule, cost=lambda action: 5.0 if str(action) == "1F0" else 1.0)
    assert "0SEND_F1 7-8" in spell(timeline)  # 1RECV_F1 is posted behind 1F0, which ends at 7


def test_transfers_overlap_with_computing() -> None:
    built = fill_drain(2, range(8), backward=False)
    spans = [simulate(add_transfers(built, lookahead=n), cost=lambda _: 1.0).span for n in (0, 2)]
    assert spans == [8 * 2 + 1, 8 + 2]  # without lookahead each transfer follows the F before it


def test_backward_waits_for_all_outputs() -> None:
    timeline = simulate(fill_drain(1, (0, 1)), cost=lambda action: 1.0 + action.op.is_backward)
    assert (timeline.span, timeline.busy, timeline.bubble_frac) == (6.0, (6.0,), 0.0)


@given(num_stages, orders, st.data())
def test_no_rule_is_broken_at_any_cost(
    num_stages: int, order: list[int], data: st.DataObject
) -> None:
    costs: dict[Action, float] = {}
    schedule = add_transfers(fill_drain(num_stages, order), lookahead=data.draw(st.integers(0, 3)))
    prices = st.integers(0, 9).map(float)
    timeline = simulate(schedule, cost=lambda action: costs.setdefault(action, data.draw(prices)))
    at = {event.action: event for event in timeline.events}
    assert set(at) == {action for rank in schedule.ranks for action in rank}
    loss = max(at[Action(num_stages - 1, Op.F, chunk)].end for chunk in order)
    for action, event in at.items():
        stage, op, chunk = action.stage, action.op, action.chunk
        if op is Op.B:
            assert event.start >= loss
        if op is Op.F and stage > 0:
            assert event.start >= at[Action(stage, Op.RECV_F, chunk)].end
        if op is Op.B and stage < num_stages - 1:
            assert event.start >= at[Action(stage, Op.RECV_B, chunk)].end
        if op in (Op.SEND_F, Op.SEND_B):
            assert event.end == event.start + costs[action] == at[action.partner].end
            assert event.start >= at[action.partner].start
    for rank in schedule.ranks:
        computes = [at[action] for action in rank if action.op.is_compute]
        for one, next_one in pairwise(computes):
            assert one.end <= next_one.start


DEADLOCKS = {
    "backward before the loss": (
        ["0F0 0B0 0F1 0B1"],
        "stage 0 stops at 0B0, which waits for 0F1",
    ),
    "backward first": (
        ["0B0 0F0 0F1 0B1", "1F0 1F1 1B1 1B0"],
        "stage 0 stops at 0B0, which waits for 1B0; stage 1 stops at 1F0, which waits for 0F0",
    ),
    "crossed transfers": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1F1 1RECV_F0 1F0"],
        "stage 0 ends with 0SEND_F0, which waits for 1RECV_F0 and 0SEND_F1, which waits for "
        "1RECV_F1; stage 1 stops at 1F1, which waits for 1RECV_F1",
    ),
    "nobody receives": (
        ["0F0 0F1 0SEND_F0", ""],
        "stage 0 ends with 0SEND_F0, which waits for 1RECV_F0",
    ),
    "nobody sends": (["", "1RECV_F0"], "stage 1 ends with 1RECV_F0, which waits for 0SEND_F0"),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_is_found_and_explained(name: str) -> None:
    lines, found = DEADLOCKS[name]
    with pytest.raises(
        ScheduleError, match=re.escape(f"a schedule without deadlock (got {found})")
    ):
        simulate(read((0, 1), *lines))


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_costs_must_be_sane(price: float) -> None:
    with pytest.raises(ScheduleError, match=rf"\(got {price} for 0F0\)"):
        simulate(fill_drain(1, (0,)), cost=lambda _: price)


def test_nothing_takes_no_time() -> None:
    timeline = simulate(read((0,), ""))
    assert (timeline.span, timeline.bubble_frac, timeline.peak_live) == (0.0, 0.0, (0,))
