"""The lists of each schedule, and which reads of an epoch are stale."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import (
    Action,
    Op,
    Schedule,
    add_transfers,
    fill_drain,
    interleaved,
    one_f_one_b,
    stale_reads,
    stream,
)
from tests.schedule.shapes import orders, write

GRIDS = {
    "fill-drain, several stages per rank: breadth-first": (
        fill_drain(4, (2, 0, 1), num_virtual=2),
        "rank 0  0F2 0F0 0F1 2F2 2F0 2F1 .   .   2B1 2B0 2B2 0B1 0B0 0B2",
        "rank 1  .   1F2 1F0 1F1 3F2 3F0 3F1 3B1 3B0 3B2 1B1 1B0 1B2 .",
    ),
    "fill-drain, a loss of each micro-batch": (
        fill_drain(2, (0, 1, 2), loss="each"),
        "stage 0  F0 F1 F2 .  .  B0 B1 B2",
        "stage 1  .  F0 F1 F2 B0 B1 B2 .",
    ),
    "1F1B": (
        one_f_one_b(4, 5),
        "stage 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 .  B2 .  B3 .  B4",
        "stage 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4 .",
        "stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .  .",
        "stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .  .",
    ),
    "1F1B, fewer micro-batches than stages": (
        one_f_one_b(4, 2),
        "stage 0  F0 F1 .  .  .  .  .  B0 .  B1",
        "stage 1  .  F0 F1 .  .  .  B0 .  B1 .",
        "stage 2  .  .  F0 F1 .  B0 .  B1 .  .",
        "stage 3  .  .  .  F0 B0 F1 B1 .  .  .",
    ),
    "interleaved, fewer micro-batches than ranks: one round": (
        interleaved(3, 2, 2),
        "rank 0  0F0 0F1 .   3F0 3F1 .   .   .   3B0 .   3B1 0B0 .   0B1",
        "rank 1  .   1F0 1F1 .   4F0 4F1 .   4B0 .   4B1 1B0 .   1B1 .",
        "rank 2  .   .   2F0 2F1 .   5F0 5B0 5F1 5B1 2B0 .   2B1 .   .",
    ),
    "a stream does not drain between mini-batches": (
        stream(3, [2, 1, 3]),
        "stage 0  F0 F1 F2 F3 F4 F5 .  .",
        "stage 1  .  F0 F1 F2 F3 F4 F5 .",
        "stage 2  .  .  F0 F1 F2 F3 F4 F5",
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_schedule_prints_as_this_grid(name: str) -> None:
    schedule, *lines = GRIDS[name]
    assert str(schedule).splitlines() == lines


def test_lists_of_fill_drain() -> None:
    schedule = fill_drain(2, (2, 0, 1))
    assert write(schedule) == ["0F2 0F0 0F1 0B1 0B0 0B2", "1F2 1F0 1F1 1B1 1B0 1B2"]
    assert " ".join(map(str, schedule.forward(1))) == "1F2 1F0 1F1"
    assert " ".join(map(str, schedule.backward(1))) == "1B1 1B0 1B2"
    inference = fill_drain(2, (1, 0), backward=False)
    assert write(inference) == ["0F1 0F0", "1F1 1F0"]
    assert (schedule.has_backward, inference.has_backward) == (True, False)


def test_rounds_are_as_equal_as_can_be() -> None:
    # 5 micro-batches on 2 ranks: a round of 3 and one of 2
    assert write(interleaved(2, 2, 5))[1] == (
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4"
    )
    assert write(stream(4, [2, 3], num_virtual=2)) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4",
        "1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4",
    ]


@pytest.mark.parametrize(("num_ranks", "num_virtual"), [*product([2, 3, 4], [2, 3])])
def test_multiples_of_the_ranks_give_the_lists_of_megatron(
    num_ranks: int, num_virtual: int
) -> None:
    """The order is that of its schedule table: k is the number of a forward, or of a backward."""
    for num_micro_batches in range(num_ranks, 4 * num_ranks + 1, num_ranks):
        schedule = interleaved(num_ranks, num_virtual, num_micro_batches)
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


@given(orders, st.data())
def test_stale_reads_are_those_of_an_epoch(order: list[int], data: st.DataObject) -> None:
    chunks = range(len(order))
    sources = {c: {d for d in chunks if c != d and data.draw(st.booleans())} for c in chunks}
    written: set[int] = set()
    expected = []
    for reader in order:
        written.add(reader)
        expected += [(reader, source) for source in sources[reader] - written]
    expected.sort()
    assert [(read.reader, read.source) for read in stale_reads(order, sources)] == expected
    with_halo = {c: found for c, found in sources.items() if found}
    assert list(stale_reads(order, with_halo)) == expected


ORDER = "Expected 'order' to hold each of the chunks"
NOT_SHARED = r"equal to num_virtual \(2\) times the number of .* lists \(got 3 stages, 1 lists\)"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda order=order: fill_drain(2, order), ORDER)
        for order in ((), (0, 0), (1, 2), (0, 2), (-1, 0))
    ),
    (lambda: stale_reads((0, 0), {}), ORDER),
    (lambda: stale_reads((0, 1), {0: {2}}), r"'sources' to name chunks 0 to 1 \(got chunk 2\)"),
    (lambda: stale_reads((0, 1), {2: {0}}), r"'sources' to name chunks 0 to 1 \(got chunk 2\)"),
    (lambda: fill_drain(0, (0,)), r"at least 1.*\(got 0 stages"),
    (lambda: fill_drain(-1, (0,)), r"at least 1.*\(got -1 stages"),
    (lambda: Schedule(2, (0,), ((),)), r"\(got 2 stages, 1 lists\)"),
    (lambda: fill_drain(3, (0,), num_virtual=2), NOT_SHARED),
    (lambda: stream(3, [1], num_virtual=2), NOT_SHARED),
    (
        lambda: fill_drain(2, (0,), loss="one"),  # type: ignore[arg-type]
        r"Expected 'loss' to be 'all' or 'each' \(got 'one'\)",
    ),
    (lambda: one_f_one_b(0, 1), r"'num_stages' to be at least 1 \(got 0\)"),
    (lambda: one_f_one_b(1, 0), r"'num_micro_batches' to be at least 1 \(got 0\)"),
    (lambda: interleaved(0, 1, 1), r"'num_ranks' to be at least 1 \(got 0\)"),
    (lambda: interleaved(1, 0, 1), r"'num_virtual' to be at least 1 \(got 0\)"),
    (lambda: stream(0, [1]), r"'num_stages' to be at least 1 \(got 0\)"),
    (lambda: stream(1, []), r"'num_micro_batches' to be at least 1 \(got 0\)"),
    (lambda: stream(1, [1, 0]), r"'num_micro_batches' to be at least 1 \(got 0\)"),
    (lambda: stream(2, [1], num_virtual=0), r"'num_virtual' to be at least 1 \(got 0\)"),
    (lambda: fill_drain(2, (0,), num_virtual=0), r"'num_virtual' to be at least 1 \(got 0\)"),
    (lambda: add_transfers(fill_drain(2, (0,)), lookahead=-1), r"'lookahead'.*\(got -1\)"),
    (lambda: add_transfers(add_transfers(fill_drain(2, (0,)))), "'add_transfers' only once"),
]


@pytest.mark.parametrize(("build", "text"), REFUSED)
def test_what_is_no_schedule_is_refused(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        build()
