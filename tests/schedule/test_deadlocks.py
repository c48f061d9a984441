"""Nothing that is built deadlocks."""

from __future__ import annotations

from itertools import product

import pytest

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import add_transfers, check, interleaved, simulate
from tests.helpers.cases import slow
from tests.schedule.oracle import runs_in_one_queue
from tests.schedule.shapes import SHAPES, build_all, forward_only
from tests.schedule.text import read


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
