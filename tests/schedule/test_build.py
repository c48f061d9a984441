from __future__ import annotations

import pytest
from hypothesis import given

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import Schedule, check, fill_drain
from tests.schedule.text import num_stages, orders, write


def test_fill_drain_goes_back_in_reverse_order() -> None:
    assert write(fill_drain(2, (2, 0, 1))) == [
        "0F2 0F0 0F1 0B1 0B0 0B2",
        "1F2 1F0 1F1 1B1 1B0 1B2",
    ]


def test_fill_drain_without_backward() -> None:
    schedule = fill_drain(2, (1, 0), backward=False)
    assert write(schedule) == ["0F1 0F0", "1F1 1F0"]
    assert not schedule.has_backward


def test_exact_mode_is_the_schedule_of_one_chunk() -> None:
    assert write(fill_drain(3, (0,))) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_phases() -> None:
    schedule = fill_drain(2, (1, 0))
    assert " ".join(map(str, schedule.forward(1))) == "1F1 1F0"
    assert " ".join(map(str, schedule.backward(1))) == "1B0 1B1"
    assert (schedule.num_chunks, schedule.has_backward, schedule.has_transfers) == (2, True, False)


@given(num_stages, orders)
def test_check_passes_for_all_that_is_built(num_stages: int, order: list[int]) -> None:
    check(fill_drain(num_stages, order))
    check(fill_drain(num_stages, order, backward=False))


@pytest.mark.parametrize("order", [(), (0, 0), (1, 2), (0, 2), (-1, 0)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="Expected 'order' to hold each of the chunks"):
        fill_drain(2, order)


@pytest.mark.parametrize("num_stages", [0, -1])
def test_a_schedule_needs_a_stage(num_stages: int) -> None:
    with pytest.raises(ScheduleError, match=rf"at least 1.*\(got {num_stages} stages"):
        fill_drain(num_stages, (0,))


def test_a_schedule_needs_one_list_a_stage() -> None:
    with pytest.raises(ScheduleError, match=r"\(got 2 stages, 1 lists\)"):
        Schedule(2, (0,), ((),))
