"""Wrong schedules are refused, at the first bad action; nothing that is built deadlocks."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

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
    simulate,
)
from tests.helpers.cases import slow
from tests.schedule.oracle import runs_in_one_queue
from tests.schedule.shapes import SHAPES, build_all, forward_only, read, schedules

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
    "F of two stages missing": (["0F0", "1F0 3F0"], "no 2F0"),
    "F of the next stage first": (
        ["2F0 0F0", "1F0 3F0"],
        "rank 0 stops at 2F0, which waits for 1F0; rank 1 stops at 1F0, which waits for 0F0",
    ),
    "B before the loss": (
        ["0F0 2F0 2B0 0B0", "1F0 3B0 3F0 1B0"],
        "rank 0 stops at 2B0, which waits for 3B0; rank 1 stops at 3B0, which waits for 3F0",
    ),
    "send of two stages missing": (
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


@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_IN_A_LOOP])
def test_the_first_bad_action_is_named(name: str) -> None:
    lines, found = (BROKEN | BROKEN_IN_A_LOOP)[name]
    if name in BROKEN:
        schedule = read((0, 1), *lines)
    else:
        schedule = read((0,), *lines, loss="each", num_virtual=2)
    with pytest.raises(ScheduleError, match=re.escape(f"(got {found})")) as error:
        check(schedule)
    if found.startswith("no "):
        assert f"bad=Action.parse('{found[3:]}')" in str(error.value)


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
        with pytest.raises(ScheduleError, match=r"0B. at place 2 of stage 0, instead of 0B."):
            check(replace(schedule, loss=other))


@given(schedules(), st.sampled_from(["drop", "double", "swap"]), st.data())
def test_no_mutation_escapes(schedule: Schedule, mutation: str, data: st.DataObject) -> None:
    """A missing, a doubled action, or two of one kind swapped."""
    good = add_transfers(schedule)
    rank = data.draw(st.integers(0, good.num_ranks - 1))
    actions = list(good.ranks[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
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


@pytest.mark.parametrize("num_ranks", [2, 3, slow(4)])
def test_any_number_of_micro_batches_runs(num_ranks: int) -> None:
    for num_virtual, num_micro_batches in product((2, 3), range(1, 65)):
        check(interleaved(num_ranks, num_virtual, num_micro_batches))


@pytest.mark.parametrize("lookahead", [0, 1, slow(2), slow(5)])
def test_no_schedule_deadlocks_with_transfers(lookahead: int) -> None:
    for shape in SHAPES:
        if lookahead in (0, 2) or shape[2] < 6:
            for schedule in (*build_all(*shape), forward_only(*shape)):
                lowered = add_transfers(schedule, lookahead=lookahead)
                check(lowered)
                assert runs_in_one_queue(lowered)


def test_receives_posted_at_will_deadlock_in_one_queue() -> None:
    """Which is why there is an order: both wait for the other one's send to come first."""
    schedule = read(
        (0, 1),
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        loss="each",
    )
    assert simulate(schedule).span == 6  # two queues, one a direction
    assert not runs_in_one_queue(schedule)
    with pytest.raises(ScheduleError, match="two ranks to list the transfers between them in the"):
        check(schedule)
