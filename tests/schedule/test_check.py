from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import (
    Loss,
    Schedule,
    add_transfers,
    check,
    fill_drain,
    interleaved,
    one_f_one_b,
)
from tests.schedule.shapes import schedules
from tests.schedule.text import num_stages, orders, read, write

BROKEN = {
    "F missing": (["0F0 0B1 0B0"], "no 0F1"),
    "F twice": (["0F0 0F1 0F0 0B1 0B0"], "a second 0F0 at place 2 of stage 0"),
    "F out of order": (["0F1 0F0 0B1 0B0"], "0F1 at place 0 of stage 0, instead of 0F0"),
    "B missing": (["0F0 0F1 0B1"], "no 0B0"),
    "B missing on one stage": (["0F0 0F1 0B1 0B0", "1F0 1F1"], "no 1B1"),
    "B before F": (["0F0 0B0 0F1 0B1"], "0B0 at place 1 of stage 0, before 0F1"),
    "B not reversed": (["0F0 0F1 0B0 0B1"], "0B0 at place 2 of stage 0, instead of 0B1"),
    "other stage": (["0F0 1F1 0B1 0B0"], "1F1 at place 1 of stage 0"),
    "no such chunk": (["0F0 0F1 0F2"], "0F2 at place 2 of stage 0"),
    "send missing": (["0F0 0SEND_F0 0F1", "1RECV_F0 1F0 1RECV_F1 1F1"], "no 0SEND_F1"),
    "receive missing": (["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1F1"], "no 1RECV_F1"),
    "receive out of order": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1"],
        "1RECV_F1 at place 0 of stage 1, instead of 1RECV_F0",
    ),
    "send to nobody": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1"],
        "an unneeded 1SEND_F0 at place 2 of stage 1",
    ),
    "receive in the wrong phase": (
        ["0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0RECV_B0 0B1 0B0", "1F0 1F1 1B1 1B0"],
        "0RECV_B1 at place 2 of stage 0, before 0F1",
    ),
    "receive too late": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1F0 1RECV_F0 1RECV_F1 1F1"],
        "stage 0 ends with 0SEND_F0, which waits for 1RECV_F0 and 0SEND_F1, which "
        "waits for 1RECV_F1; stage 1 stops at 1F0, which waits for 1RECV_F0",
    ),
    "send too early": (
        ["0SEND_F0 0F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1"],
        "stage 0 stops at 0SEND_F0, which waits for 0F0; "
        "stage 1 stops at 1F0, which waits for 1RECV_F0",
    ),
}


BROKEN_IN_A_LOOP = {
    "other rank": (["0F0 3F0", "1F0 2F0"], "3F0 at place 1 of rank 0"),
    "no such stage": (["0F0 2F0 4F0", "1F0 3F0"], "4F0 at place 2 of rank 0"),
    "F missing": (["0F0", "1F0 3F0"], "no 2F0"),
    "F of the next stage first": (
        ["2F0 0F0", "1F0 3F0"],
        "rank 0 stops at 2F0, which waits for 1F0; rank 1 stops at 1F0, which waits for 0F0",
    ),
    "B before the loss": (
        ["0F0 2F0 2B0 0B0", "1F0 3B0 3F0 1B0"],
        "rank 0 stops at 2B0, which waits for 3B0; rank 1 stops at 3B0, which waits for 3F0",
    ),
    "send missing": (
        ["0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0", "1RECV_F0 1F0 3RECV_F0 3F0"],
        "no 1SEND_F0",
    ),
    "transfers of two ranks in two orders": (
        [
            "0F0 2RECV_F0 0SEND_F0 2F0 2SEND_F0",
            "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0",
        ],
        "2RECV_F0 at place 1 of rank 0, but 1RECV_F0 at place 0 of rank 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN_IN_A_LOOP)
def test_the_first_bad_action_of_a_rank_with_two_stages_is_named(name: str) -> None:
    lines, found = BROKEN_IN_A_LOOP[name]
    with pytest.raises(ScheduleError, match=re.escape(f"(got {found})")):
        check(read((0,), *lines, loss="each", num_virtual=2))


def test_a_loss_on_all_outputs_refuses_1f1b() -> None:
    asks = "every rank to finish its forward actions before its first backward action, since the "
    found = re.escape("(got 1B0 at place 1 of stage 1, before 1F1). Use 'fill_drain' for such")
    for lower in (False, True):
        for schedule in (one_f_one_b(2, 2), interleaved(2, 2, 4)):
            schedule = add_transfers(schedule) if lower else schedule
            check(schedule)
            with pytest.raises(ScheduleError, match=f"Expected {asks}"):
                check(replace(schedule, loss="all"))
    with pytest.raises(ScheduleError, match=found):
        check(replace(one_f_one_b(2, 2), loss="all"))


def test_the_order_of_the_backward_phase_belongs_to_the_loss() -> None:
    losses: list[tuple[Loss, Loss]] = [("all", "each"), ("each", "all")]
    for ours, other in losses:
        schedule = fill_drain(2, (0, 1), loss=ours)
        check(schedule)
        with pytest.raises(ScheduleError, match=r"0B. at place 2 of stage 0, instead of 0B."):
            check(replace(schedule, loss=other))


@pytest.mark.parametrize("name", BROKEN)
def test_the_first_bad_action_is_named(name: str) -> None:
    lines, found = BROKEN[name]
    with pytest.raises(ScheduleError, match=re.escape(f"(got {found})")):
        check(read((0, 1), *lines))


def test_the_error_shows_how_to_look_at_it() -> None:
    with pytest.raises(ScheduleError, match=re.escape("bad=Action.parse('0F1')")):
        check(read((0, 1), "0F0"))


@given(num_stages, orders, st.data())
def test_no_missing_action_escapes(num_stages: int, order: list[int], data: st.DataObject) -> None:
    good = add_transfers(fill_drain(num_stages, order))
    words = [line.split() for line in write(good)]
    stage = data.draw(st.integers(0, num_stages - 1))
    assume(len(order) * num_stages > 1)  # there, without its only B, it is a forward schedule
    words[stage].pop(data.draw(st.integers(0, len(words[stage]) - 1)))
    with pytest.raises(ScheduleError):
        check(read(order, *(" ".join(line) for line in words)))


@given(num_stages, orders, st.data())
def test_no_doubled_action_escapes(num_stages: int, order: list[int], data: st.DataObject) -> None:
    good = add_transfers(fill_drain(num_stages, order))
    stage = data.draw(st.integers(0, num_stages - 1))
    rank = list(good.ranks[stage])
    rank.insert(data.draw(st.integers(0, len(rank))), data.draw(st.sampled_from(rank)))
    ranks = (*good.ranks[:stage], tuple(rank), *good.ranks[stage + 1 :])
    with pytest.raises(ScheduleError):
        check(Schedule(num_stages, tuple(order), ranks))


@given(schedules(), st.data())
def test_no_mutation_of_micro_batches_escapes(schedule: Schedule, data: st.DataObject) -> None:
    """A missing, a doubled action, or two of one kind swapped."""
    good = add_transfers(schedule)
    rank = data.draw(st.integers(0, good.num_ranks - 1))
    actions = list(good.ranks[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
    mutation = data.draw(st.sampled_from(["drop", "double", "swap"]))
    if mutation == "drop":
        assume(sum(map(len, good.ranks)) > 2)  # without its only B, it is a forward schedule
        del actions[place]
    elif mutation == "double":
        actions.insert(data.draw(st.integers(0, len(actions))), actions[place])
    else:
        one = actions[place]
        same = [i for i, two in enumerate(actions) if (two.stage, two.op) == (one.stage, one.op)]
        other = data.draw(st.sampled_from(same))
        assume(other != place)
        actions[place], actions[other] = actions[other], one
    ranks = (*good.ranks[:rank], tuple(actions), *good.ranks[rank + 1 :])
    with pytest.raises(ScheduleError):
        check(replace(good, ranks=ranks))
