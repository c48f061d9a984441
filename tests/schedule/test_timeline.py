"""Time and memory of schedules: closed forms, and any costs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.schedule import (
    Action,
    Op,
    Schedule,
    add_transfers,
    fill_drain,
    interleaved,
    one_f_one_b,
    simulate,
    stream,
)
from tests.schedule.oracle import end_times
from tests.schedule.shapes import SHAPES, build_all, forward_only, random_cost, schedules, seeds


def ideal_span(num_ranks: int, num_virtual: int, num_micro_batches: int) -> int:
    """Return the steps of one direction: a fill of the pipeline, and work without a gap."""
    most, least = max(num_micro_batches, num_ranks), min(num_micro_batches, num_ranks)
    return num_virtual * most + least - 1


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 1)])
def test_idle_time_is_the_closed_form(forward: int, backward: int) -> None:
    prices = {Op.F: forward, Op.B: backward}
    for shape in SHAPES:
        num_ranks, num_virtual, num_micro_batches = shape
        work = num_virtual * num_micro_batches
        for schedule in build_all(*shape):
            timeline = simulate(schedule, cost=lambda action: prices[action.op])
            assert timeline.span == (forward + backward) * ideal_span(*shape)
            if num_micro_batches >= num_ranks or num_virtual == 1:
                share = (num_ranks - 1) / (work + num_ranks - 1)
            else:
                share = 1 - work / (num_virtual * num_ranks + num_micro_batches - 1)
            assert timeline.bubble_frac == pytest.approx(share, abs=1e-15)


def test_more_stages_a_rank_are_less_idle() -> None:
    shares = [simulate(interleaved(4, num_virtual, 8)).bubble_frac for num_virtual in (1, 2, 4)]
    assert shares == [3 / (8 + 3), 3 / (16 + 3), 3 / (32 + 3)]


@given(schedules(), seeds)
def test_times_are_longest_paths(schedule: Schedule, seed: int) -> None:
    timeline = simulate(schedule, cost=random_cost(seed))
    assert {each.action: each.end for each in timeline.events} == end_times(
        schedule, random_cost(seed)
    )


@given(schedules(), seeds, st.integers(0, 3))
def test_transfers_that_take_no_time_change_no_time(
    schedule: Schedule, seed: int, lookahead: int
) -> None:
    cost = random_cost(seed, most_of_transfer=0)
    ends = {each.action: each.end for each in simulate(schedule, cost=cost).events}
    lowered = simulate(add_transfers(schedule, lookahead=lookahead), cost=cost)
    assert ends.items() <= {each.action: each.end for each in lowered.events}.items()


@given(schedules(), seeds)
def test_no_rule_is_broken_at_any_cost(schedule: Schedule, seed: int) -> None:
    lowered, cost = add_transfers(schedule), random_cost(seed)
    at = {each.action: each for each in simulate(lowered, cost=cost).events}
    assert set(at) == {action for rank in lowered.ranks for action in rank}
    last = schedule.num_stages - 1
    for rank, actions in enumerate(lowered.ranks):
        now = 0.0
        for action in actions:
            event = at[action]
            assert event.rank == rank
            if action.op.is_compute:
                assert event.start >= now
                now = event.end
            if action.op is Op.F and action.stage:
                assert event.start >= at[Action(action.stage - 1, Op.F, action.chunk)].end
            if action.op is Op.B:
                behind = Action(action.stage + 1, Op.B, action.chunk)
                loss = Action(last, Op.F, action.chunk)
                assert event.start >= at[loss if action.stage == last else behind].end
            if action.op in (Op.SEND_F, Op.SEND_B):
                assert event.start >= max(at[action.served].end, at[action.partner].start)
                assert event.end == event.start + cost(action) == at[action.partner].end
    links: dict[tuple[int, int], float] = {}
    for event in sorted(at.values(), key=lambda each: (each.start, each.end)):
        if event.action.op in (Op.SEND_F, Op.SEND_B):
            link = event.rank, at[event.action.partner].rank
            assert event.start >= links.get(link, 0.0), "one transfer at a time"
            links[link] = event.end


def test_peaks_of_live_chunks() -> None:
    for num_ranks, num_virtual, num_micro_batches in SHAPES:
        work = num_virtual * num_micro_batches
        *both, alternating = build_all(num_ranks, num_virtual, num_micro_batches)
        for schedule in both:
            assert simulate(schedule).peak_live == (work,) * num_ranks
        if num_virtual == 1:
            expected = [min(num_ranks - rank, work) for rank in range(num_ranks)]
        else:
            num_rounds = max(1, num_micro_batches // num_ranks)
            most = (num_virtual - 1) * -(-num_micro_batches // num_rounds) + 1
            expected = [min(most + 2 * (num_ranks - rank - 1), work) for rank in range(num_ranks)]
        assert simulate(alternating).peak_live == tuple(expected)


def test_the_memory_of_one_f_one_b_does_not_grow_with_the_number_of_micro_batches() -> None:
    peaks = [simulate(one_f_one_b(3, number)).peak_live for number in (1, 2, 3, 10, 50)]
    assert peaks == [(1, 1, 1), (2, 2, 1), (3, 2, 1), (3, 2, 1), (3, 2, 1)]
    assert simulate(fill_drain(3, range(50), loss="each")).peak_live == (50, 50, 50)


@given(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=12), seeds)
def test_one_f_one_b_never_keeps_more_bytes_than_fill_drain(
    num_stages: int, sizes: list[int], seed: int
) -> None:
    def bytes_of(action: Action) -> float:
        assert action.op is Op.F
        return sizes[action.chunk]

    filled = fill_drain(num_stages, range(len(sizes)), loss="each")
    assert simulate(filled).peak_bytes(bytes_of) == (sum(sizes),) * num_stages
    timeline = simulate(one_f_one_b(num_stages, len(sizes)), cost=random_cost(seed))
    for stage, peak in enumerate(timeline.peak_bytes(bytes_of)):
        window = min(num_stages - stage, len(sizes))  # as many as are live, one behind the other
        starts = range(len(sizes) - window + 1)
        assert peak == max(sum(sizes[first : first + window]) for first in starts)


@given(schedules(), seeds)
def test_peaks_do_not_depend_on_costs(schedule: Schedule, seed: int) -> None:
    lowered = add_transfers(schedule)
    peaks = simulate(schedule).peak_live
    timeline = simulate(lowered, cost=random_cost(seed))
    assert timeline.peak_live == peaks == timeline.peak_bytes(lambda _: 1)


@pytest.mark.parametrize("lookahead", [0, 2, 4])
def test_open_receives_are_few(lookahead: int) -> None:
    def count_open(rank: tuple[Action, ...]) -> int:
        """Return the most receives that are posted, of which the data is not used yet."""
        posted, most = set[Action](), 0
        for action in rank:
            if action.op in (Op.RECV_F, Op.RECV_B):
                posted.add(action.served)
            most = max(most, len(posted))
            if action.op.is_compute:
                posted.discard(action)
        return most

    for num_ranks, num_micro_batches in product(range(2, 6), range(1, 21)):
        bounds = {
            fill_drain(num_ranks, range(num_micro_batches)): lookahead + 1,
            stream(num_ranks, [num_micro_batches]): lookahead + 1,
            one_f_one_b(num_ranks, num_micro_batches): lookahead + 2,
            interleaved(num_ranks, 2, num_micro_batches): num_ranks + max(lookahead, 3),
            interleaved(num_ranks, 3, num_micro_batches): num_ranks + max(lookahead, 3),
        }
        for schedule, most in bounds.items():
            lowered = add_transfers(schedule, lookahead=lookahead)
            assert max(count_open(rank) for rank in lowered.ranks) <= most


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_the_slowest_stage_sets_the_pace_of_a_stream(costs: list[int], batches: list[int]) -> None:
    def cost(action: Action) -> float:
        return costs[action.stage]

    timeline = simulate(stream(len(costs), batches), cost=cost)
    last = len(costs) - 1
    ends = [each.end for each in timeline.events if each.action.stage == last]
    assert ends == [sum(costs) + max(costs) * chunk for chunk in range(sum(batches))]
    drained = [simulate(stream(len(costs), [size]), cost=cost).span for size in batches]
    filled_again = (len(batches) - 1) * (sum(costs) - max(costs))
    assert timeline.span == sum(drained) - filled_again


def test_a_stream_is_idle_while_it_fills_and_drains() -> None:
    for shape in SHAPES:
        timeline = simulate(forward_only(*shape))
        assert timeline.span == ideal_span(*shape)
        assert timeline.peak_live == (1,) * shape[0]  # nothing is kept for a backward phase
