"""Time, memory and bytes of schedules: closed forms, and any costs."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import (
    Action,
    Op,
    Schedule,
    Timeline,
    add_transfers,
    fill_drain,
    graph_parallel_bytes,
    interleaved,
    one_f_one_b,
    pipeline_bytes,
    simulate,
    stream,
)
from tests.schedule.oracle import end_times
from tests.schedule.shapes import (
    SHAPES,
    build_all,
    forward_only,
    num_stages,
    orders,
    random_cost,
    read,
    schedules,
    seeds,
)


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
        streamed = simulate(forward_only(*shape))
        assert streamed.span == ideal_span(*shape)
        assert streamed.peak_live == (1,) * num_ranks  # nothing is kept for a backward phase
        for schedule in build_all(*shape):
            timeline = simulate(schedule, cost=lambda action: prices[action.op])
            assert timeline.span == (forward + backward) * ideal_span(*shape)
            if num_micro_batches >= num_ranks or num_virtual == 1:
                share = (num_ranks - 1) / (work + num_ranks - 1)
            else:
                share = 1 - work / (num_virtual * num_ranks + num_micro_batches - 1)
            assert timeline.bubble_frac == pytest.approx(share, abs=1e-15)


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


@given(schedules(), seeds, st.integers(0, 3))
def test_no_rule_is_broken_at_any_cost(schedule: Schedule, seed: int, lookahead: int) -> None:
    lowered, cost = add_transfers(schedule, lookahead=lookahead), random_cost(seed)
    timeline = simulate(lowered, cost=cost)
    assert timeline.peak_live == simulate(schedule).peak_live == timeline.peak_bytes(lambda _: 1)
    at = {each.action: each for each in timeline.events}
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
            elif action.op is Op.B:
                behind = Action(action.stage + 1, Op.B, action.chunk)
                loss = Action(last, Op.F, action.chunk)
                assert event.start >= at[loss if action.stage == last else behind].end
            elif action.op.is_send:
                assert event.start >= max(at[action.served].end, at[action.partner].start)
                assert event.end == event.start + cost(action) == at[action.partner].end
            elif not action.op.is_compute:
                assert at[action.served].start >= event.end
    links: dict[tuple[int, int], float] = {}
    for event in sorted(at.values(), key=lambda each: (each.start, each.end)):
        if event.action.op.is_send:
            link = event.rank, at[event.action.partner].rank
            assert event.start >= links.get(link, 0.0), "one transfer at a time"
            links[link] = event.end


def spell(timeline: Timeline) -> list[str]:
    """Return the events as text."""
    return [f"{each.action} {each.start:g}-{each.end:g}" for each in timeline.events]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    schedule = add_transfers(fill_drain(2, (0, 1), backward=False))
    timeline = simulate(schedule, cost=lambda action: 1.0 if action.op.is_compute else 3.0)
    assert spell(timeline) == [
        "0F0 0-1",
        "1RECV_F0 0-4",  # posted at 0, arrived at 4
        "1RECV_F1 0-7",
        "0F1 1-2",
        "0SEND_F0 1-4",
        "0SEND_F1 4-7",  # started at 2, the link was free at 4
        "1F0 4-5",
        "1F1 7-8",
    ]


def test_transfers_wait_for_their_receives_and_overlap_with_computing() -> None:
    schedule = add_transfers(fill_drain(2, (0, 1), backward=False), lookahead=0)
    timeline = simulate(schedule, cost=lambda action: 5.0 if str(action) == "1F0" else 1.0)
    assert "0SEND_F1 7-8" in spell(timeline)  # 1RECV_F1 is posted behind 1F0, which ends at 7
    built = fill_drain(2, range(8), backward=False)
    spans = [simulate(add_transfers(built, lookahead=n), cost=lambda _: 1.0).span for n in (0, 2)]
    assert spans == [8 * 2 + 1, 8 + 2]  # without lookahead each transfer follows the F before it


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


def count_open(rank: tuple[Action, ...]) -> int:
    """Return the most receives that are posted, of which the data is not used yet."""
    posted, most = set[Action](), 0
    for action in rank:
        if action.op.is_compute:
            posted.discard(action)
        elif not action.op.is_send:
            posted.add(action.served)
        most = max(most, len(posted))
    return most


@pytest.mark.parametrize("lookahead", [0, 2, 4])
def test_open_receives_are_few(lookahead: int) -> None:
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


DEADLOCKS = {
    "stage 0 stops at 0B0, which waits for 0F1": ["0F0 0B0 0F1 0B1"],
    "stage 0 stops at 0B0, which waits for 1B0; stage 1 stops at 1F0, which waits for 0F0": [
        "0B0 0F0 0F1 0B1",
        "1F0 1F1 1B1 1B0",
    ],
    "stage 0 ends with 0SEND_F0, which waits for 1RECV_F0 and 0SEND_F1, which waits for 1RECV_F1; "
    "stage 1 stops at 1F1, which waits for 1RECV_F1": [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F1 1F1 1RECV_F0 1F0",
    ],
    "stage 0 ends with 0SEND_F0, which waits for 1RECV_F0": ["0F0 0F1 0SEND_F0", ""],
    "stage 1 ends with 1RECV_F0, which waits for 0SEND_F0": ["", "1RECV_F0"],
}


@pytest.mark.parametrize("found", DEADLOCKS)
def test_a_deadlock_is_found_and_explained(found: str) -> None:
    text = re.escape(f"a schedule without deadlock (got {found})")
    with pytest.raises(ScheduleError, match=text):
        simulate(read((0, 1), *DEADLOCKS[found]))


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_costs_must_be_sane_and_nothing_takes_no_time(price: float) -> None:
    with pytest.raises(ScheduleError, match=rf"\(got {price} for 0F0\)"):
        simulate(fill_drain(1, (0,)), cost=lambda _: price)
    timeline = simulate(read((0,), ""))
    assert (timeline.span, timeline.bubble_frac, timeline.peak_live) == (0.0, 0.0, (0,))


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
    assert count(num_stages=1, row_bytes=[]) == 0
    for row_bytes in ([], [1, 1, 1]):
        with pytest.raises(ScheduleError, match="one entry for each of the 2 cuts"):
            count(row_bytes=row_bytes)


@given(num_stages, orders, st.data())
def test_pipeline_bytes_are_those_of_the_sends(
    num_stages: int, order: list[int], data: st.DataObject
) -> None:
    sizes = [data.draw(st.integers(1, 9)) for _ in order]  # nodes of each chunk
    row_bytes = [data.draw(st.integers(1, 99)) for _ in range(num_stages - 1)]
    sent = 0
    for rank in add_transfers(fill_drain(num_stages, order)).ranks:
        for action in rank:
            if action.op.is_send:
                sent += sizes[action.chunk] * row_bytes[min(action.stage, action.partner.stage)]
    assert sent == pipeline_bytes(
        num_stages=num_stages, num_nodes=sum(sizes), row_bytes=row_bytes, output_row_bytes=0
    )


def test_graph_parallel_bytes() -> None:
    # 7 replicas of 10 nodes: 2 * 4 layers * 7 rows * 16 bytes; ring of 3 shards
    count = partial(
        graph_parallel_bytes, num_layers=4, num_nodes=10, row_bytes=16, weight_bytes=100
    )
    found = count(replicas_per_node=0.7, num_shards=3)
    assert found == 2 * 4 * 7 * 16 + 2 * 2 * 100
    assert isinstance(found, int)
    assert count(replicas_per_node=0.0, num_shards=1) == 0
