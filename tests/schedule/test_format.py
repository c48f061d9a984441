from __future__ import annotations

import pytest

from lightning_gnnpipe.schedule import (
    Action,
    Schedule,
    add_transfers,
    fill_drain,
    format_chart,
    format_grid,
    interleaved,
    simulate,
)
from tests.schedule.shapes import read

GRIDS: dict[str, tuple[Schedule, str, list[str]]] = {
    "the bad action is marked": (
        fill_drain(2, (0, 1)),
        "1B0",
        ["stage 0  F0  F1  .   .   B1  B0", "stage 1  .   F0  F1  B1  B0* ."],
    ),
    "a bad transfer marks what it serves": (
        add_transfers(fill_drain(2, (0,))),
        "0RECV_B0",
        ["stage 0  F0  .   .   B0*", "stage 1  .   F0  B0  ."],
    ),
    "a missing action gets a line": (
        read((0, 1), "0F0"),
        "0F1",
        ["stage 0  F0", "* 0F1 is not in the schedule"],
    ),
    "a deadlock is shown as far as it runs": (
        read((0, 1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"),
        "0B0",
        ["stage 0  F0   .    B0*? F1?  B1?", "stage 1  .    F0   F1?  B1?  B0?"],
    ),
    "a deadlock of ranks with several stages": (
        read((0,), "2F0 0F0", "1F0 3F0", loss="each", num_virtual=2),
        "",
        ["rank 0  2F0? 0F0?", "rank 1  1F0? 3F0?"],
    ),
    "cells name the stage where a rank has several": (
        interleaved(2, 2, 1),
        "2B0",
        [
            "rank 0  0F0  .    2F0  .    .    2B0* .    0B0",
            "rank 1  .    1F0  .    3F0  3B0  .    1B0  .",
        ],
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name: str) -> None:
    schedule, bad, lines = GRIDS[name]
    assert format_grid(schedule, bad=Action.parse(bad) if bad else None).splitlines() == lines


def test_the_grid_is_how_a_schedule_prints() -> None:
    schedule = fill_drain(11, range(11))
    assert str(schedule) == str(add_transfers(schedule)) == format_grid(schedule)
    lines = str(schedule).splitlines()  # labels and cells are aligned
    assert lines[0].startswith("stage 0   F0  F1 ")
    assert lines[10].startswith("stage 10  .   . ")


def test_the_chart_is_to_scale() -> None:
    timeline = simulate(fill_drain(2, (0, 1)), cost=lambda action: 1 + action.op.is_backward)
    assert format_chart(timeline, width=36).splitlines() == [
        "stage 0 |F0--F1--............B1======B0======|  66.7% busy",
        "stage 1 |....F0--F1--B1======B0======........|  66.7% busy",
        "span 9, bubble 33.3%, at most 2 live chunks on a stage",
    ]
    assert format_chart(simulate(interleaved(2, 2, 1)), width=32).splitlines() == [
        "rank 0 |0F0-....2F0-........2B0=....0B0=|  50.0% busy",
        "rank 1 |....1F0-....3F0-3B0=....1B0=....|  50.0% busy",
        "span 8, bubble 50.0%, at most 2 live chunks on a rank",
    ]


def test_the_chart_has_its_width_whatever_is_in_it() -> None:
    for num_chunks in (1, 7, 100):
        lines = format_chart(simulate(fill_drain(3, range(num_chunks)))).splitlines()
        assert {line.index("|", 9) - line.index("|") for line in lines[:3]} == {73}
    nothing = format_chart(simulate(read((0,), "")), width=3)
    assert nothing.splitlines()[0] == "stage 0 |...|  0.0% busy"
