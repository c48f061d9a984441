"""The lists of schedules of independent micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import (
    Action,
    Op,
    Schedule,
    fill_drain,
    interleaved,
    one_f_one_b,
    stream,
)
from tests.schedule.shapes import SHAPES, build_all
from tests.schedule.text import write


def test_one_f_one_b() -> None:
    assert str(one_f_one_b(4, 5)).splitlines() == [
        "stage 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 .  B2 .  B3 .  B4",
        "stage 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4 .",
        "stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .  .",
        "stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .  .",
    ]


def test_one_f_one_b_with_fewer_micro_batches_than_stages() -> None:
    assert str(one_f_one_b(4, 2)).splitlines() == [
        "stage 0  F0 F1 .  .  .  .  .  B0 .  B1",
        "stage 1  .  F0 F1 .  .  .  B0 .  B1 .",
        "stage 2  .  .  F0 F1 .  B0 .  B1 .  .",
        "stage 3  .  .  .  F0 B0 F1 B1 .  .  .",
    ]
    assert write(one_f_one_b(1, 3)) == ["0F0 0B0 0F1 0B1 0F2 0B2"]
    assert write(one_f_one_b(2, 1)) == ["0F0 0B0", "1F0 1B0"]


def test_interleaved() -> None:
    assert str(interleaved(2, 2, 4)).splitlines() == [
        "rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3",
        "rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .",
    ]


def test_rounds_are_as_equal_as_can_be() -> None:
    # 5 micro-batches on 2 ranks: a round of 3 and one of 2
    assert write(interleaved(2, 2, 5))[1] == (
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4"
    )
    # fewer micro-batches than ranks: one round
    assert str(interleaved(3, 2, 2)).splitlines() == [
        "rank 0  0F0 0F1 .   3F0 3F1 .   .   .   3B0 .   3B1 0B0 .   0B1",
        "rank 1  .   1F0 1F1 .   4F0 4F1 .   4B0 .   4B1 1B0 .   1B1 .",
        "rank 2  .   .   2F0 2F1 .   5F0 5B0 5F1 5B1 2B0 .   2B1 .   .",
    ]


def test_fill_drain_of_several_stages_a_rank_is_breadth_first() -> None:
    assert str(fill_drain(4, (2, 0, 1), num_virtual=2)).splitlines() == [
        "rank 0  0F2 0F0 0F1 2F2 2F0 2F1 .   .   2B1 2B0 2B2 0B1 0B0 0B2",
        "rank 1  .   1F2 1F0 1F1 3F2 3F0 3F1 3B1 3B0 3B2 1B1 1B0 1B2 .",
    ]


def test_a_loss_of_each_micro_batch_lets_them_go_back_in_their_order() -> None:
    assert str(fill_drain(2, (0, 1, 2), loss="each")).splitlines() == [
        "stage 0  F0 F1 F2 .  .  B0 B1 B2",
        "stage 1  .  F0 F1 F2 B0 B1 B2 .",
    ]


def test_stream_does_not_drain_between_mini_batches() -> None:
    assert str(stream(3, [2, 1, 3])).splitlines() == [
        "stage 0  F0 F1 F2 F3 F4 F5 .  .",
        "stage 1  .  F0 F1 F2 F3 F4 F5 .",
        "stage 2  .  .  F0 F1 F2 F3 F4 F5",
    ]
    assert write(stream(4, [2, 3], num_virtual=2)) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4",
        "1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4",
    ]


@pytest.mark.parametrize("num_virtual", [2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_multiples_of_the_ranks_give_the_lists_of_megatron(
    num_ranks: int, num_virtual: int
) -> None:
    """The order is that of its schedule table: k is the number of a forward, or of a backward."""
    for num_micro_batches in range(num_ranks, 4 * num_ranks + 1, num_ranks):
        schedule, total = interleaved(num_ranks, num_virtual, num_micro_batches), None
        for rank, actions in enumerate(schedule.ranks):
            total = num_virtual * num_micro_batches
            num_warmup = min(2 * (num_ranks - rank - 1) + (num_virtual - 1) * num_ranks, total)
            expected = []
            for k in range(total + num_warmup):
                for op, number in ((Op.F, k), (Op.B, k - num_warmup)):
                    if 0 <= number < total:
                        group, place = divmod(number, num_ranks * num_virtual)
                        virtual, index = divmod(place, num_ranks)
                        if op is Op.B:
                            virtual = num_virtual - 1 - virtual
                        stage = virtual * num_ranks + rank
                        expected.append(Action(stage, op, group * num_ranks + index))
            assert list(actions) == expected


def test_one_stage_a_rank_is_one_f_one_b() -> None:
    for num_ranks, num_micro_batches in product(range(1, 6), range(1, 13)):
        expected = one_f_one_b(num_ranks, num_micro_batches)
        assert interleaved(num_ranks, 1, num_micro_batches) == expected


def test_gradients_are_summed_in_one_order_by_all_schedules() -> None:
    for shape in SHAPES:
        for schedule in build_all(*shape):
            for rank in schedule.ranks:
                back = [action for action in rank if action.op is Op.B]
                for stage in {action.stage for action in back}:
                    chunks = [action.chunk for action in back if action.stage == stage]
                    order = list(range(shape[2]))
                    assert chunks == (order if schedule.loss == "each" else order[::-1])


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: one_f_one_b(0, 1), "num_stages"),
        (lambda: one_f_one_b(1, 0), "num_micro_batches"),
        (lambda: interleaved(0, 1, 1), "num_ranks"),
        (lambda: interleaved(1, 0, 1), "num_virtual"),
        (lambda: interleaved(1, 2, 0), "num_micro_batches"),
        (lambda: stream(0, [1]), "num_stages"),
        (lambda: stream(1, []), "num_micro_batches"),
        (lambda: stream(1, [1, 0]), "num_micro_batches"),
        (lambda: stream(2, [1], num_virtual=0), "num_virtual"),
        (lambda: fill_drain(2, (0,), num_virtual=0), "num_virtual"),
    ],
)
def test_counts_start_at_1(build: Callable[[], Schedule], name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"Expected '{name}' to be at least 1 \(got 0\)"):
        build()


@pytest.mark.parametrize("num_stages", [1, 3, 5])
def test_stages_that_cannot_be_dealt_out_are_refused(num_stages: int) -> None:
    got = rf"\(got {num_stages} stages, {num_stages // 2} lists\)"
    found = rf"equal to num_virtual \(2\) times the number of action lists {got}"
    with pytest.raises(ScheduleError, match=found):
        fill_drain(num_stages, (0,), num_virtual=2)
    with pytest.raises(ScheduleError, match=found):
        stream(num_stages, [1], num_virtual=2)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Expected 'loss' to be 'all' or 'each' \(got 'one'\)"):
        fill_drain(2, (0,), loss="one")  # type: ignore[arg-type]
