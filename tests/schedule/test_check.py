from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import Schedule, add_transfers, check, fill_drain
from tests.schedule.text import num_stages, orders, read, write

BROKEN = {
    "F missing": (["0F0 0B1 0B0"], "no 0F1"),
    "F twice": (["0F0 0F1 0F0 0B1 0B0"], "0F0 a second time, at place 2 of stage 0"),
    "F out of order": (["0F1 0F0 0B1 0B0"], "0F1 at place 0 of stage 0, where 0F0 is due"),
    "B missing": (["0F0 0F1 0B1"], "no 0B0"),
    "B missing on one stage": (["0F0 0F1 0B1 0B0", "1F0 1F1"], "no 1B1"),
    "B before F": (["0F0 0B0 0F1 0B1"], "0B0 at place 1 of stage 0, before 0F1"),
    "B not reversed": (["0F0 0F1 0B0 0B1"], "0B0 at place 2 of stage 0, where 0B1 is due"),
    "other stage": (["0F0 1F1 0B1 0B0"], "1F1 at place 1 of stage 0"),
    "no such chunk": (["0F0 0F1 0F2"], "0F2 at place 2 of stage 0"),
    "send missing": (["0F0 0SEND_F0 0F1", "1RECV_F0 1F0 1RECV_F1 1F1"], "no 0SEND_F1"),
    "receive missing": (["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1F1"], "no 1RECV_F1"),
    "receive out of order": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1"],
        "1RECV_F1 at place 0 of stage 1, where 1RECV_F0 is due",
    ),
    "send to nobody": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1"],
        "1SEND_F0 where there is no use for it, at place 2 of stage 1",
    ),
    "receive in the wrong phase": (
        ["0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0RECV_B0 0B1 0B0", "1F0 1F1 1B1 1B0"],
        "0RECV_B1 at place 2 of stage 0, before 0F1",
    ),
    "receive too late": (
        ["0F0 0SEND_F0 0F1 0SEND_F1", "1F0 1RECV_F0 1RECV_F1 1F1"],
        "a deadlock: stage 0 ends with 0SEND_F0, which waits for 1RECV_F0 and 0SEND_F1, which "
        "waits for 1RECV_F1; stage 1 stops at 1F0, which waits for 1RECV_F0",
    ),
    "send too early": (
        ["0SEND_F0 0F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1"],
        "a deadlock: stage 0 stops at 0SEND_F0, which waits for 0F0; "
        "stage 1 stops at 1F0, which waits for 1RECV_F0",
    ),
}


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
