from __future__ import annotations

from lightning_gnnpipe.schedule import (
    Action,
    add_transfers,
    fill_drain,
    format_chart,
    format_grid,
    interleaved,
    simulate,
)
from tests.schedule.text import read


def test_the_grid_is_how_a_schedule_prints() -> None:
    grid = [
        "stage 0  F2 F0 F1 .  .  .  .  B1 B0 B2",
        "stage 1  .  F2 F0 F1 .  .  B1 B0 B2 .",
        "stage 2  .  .  F2 F0 F1 B1 B0 B2 .  .",
    ]
    assert str(fill_drain(3, (2, 0, 1))).splitlines() == grid
    assert str(add_transfers(fill_drain(3, (2, 0, 1)))).splitlines() == grid


def test_the_bad_action_is_marked() -> None:
    assert format_grid(fill_drain(2, (0, 1)), bad=Action.parse("1B0")).splitlines() == [
        "stage 0  F0  F1  .   .   B1  B0",
        "stage 1  .   F0  F1  B1  B0* .",
    ]


def test_a_bad_transfer_marks_what_it_serves() -> None:
    schedule = add_transfers(fill_drain(2, (0,)))
    assert format_grid(schedule, bad=Action.parse("0RECV_B0")).splitlines() == [
        "stage 0  F0  .   .   B0*",
        "stage 1  .   F0  B0  .",
    ]


def test_a_missing_action_gets_a_line() -> None:
    schedule = read((0, 1), "0F0")
    assert format_grid(schedule, bad=Action.parse("0F1")).splitlines() == [
        "stage 0  F0",
        "* 0F1 is not in the schedule",
    ]


def test_a_deadlock_is_shown_as_far_as_it_runs() -> None:
    schedule = read((0, 1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0")
    assert format_grid(schedule, bad=Action.parse("0B0")).splitlines() == [
        "stage 0  F0   .    B0*? F1?  B1?",
        "stage 1  .    F0   F1?  B1?  B0?",
    ]


def test_labels_and_cells_are_aligned() -> None:
    lines = format_grid(fill_drain(11, range(11))).splitlines()
    assert lines[0].startswith("stage 0   F0  F1 ")
    assert lines[10].startswith("stage 10  .   . ")


def test_the_chart_is_to_scale() -> None:
    timeline = simulate(fill_drain(2, (0, 1)), cost=lambda action: 1 + action.op.is_backward)
    assert format_chart(timeline, width=36).splitlines() == [
        "stage 0 |F0--F1--............B1======B0======|  66.7% busy",
        "stage 1 |....F0--F1--B1======B0======........|  66.7% busy",
        "span 9, bubble 33.3%, at most 2 live chunks on a stage",
    ]


def test_the_chart_has_its_width_whatever_is_in_it() -> None:
    for num_chunks in (1, 7, 100):
        lines = format_chart(simulate(fill_drain(3, range(num_chunks)))).splitlines()
        assert {line.index("|", 9) - line.index("|") for line in lines[:3]} == {73}
    assert (
        format_chart(simulate(read((0,), "")), width=3).splitlines()[0]
        == "stage 0 |...|  0.0% busy"
    )


def test_cells_name_the_stage_where_a_rank_has_several() -> None:
    schedule = interleaved(2, 2, 1)
    assert format_grid(schedule, bad=Action.parse("2B0")).splitlines() == [
        "rank 0  0F0  .    2F0  .    .    2B0* .    0B0",
        "rank 1  .    1F0  .    3F0  3B0  .    1B0  .",
    ]
    assert format_chart(simulate(schedule), width=32).splitlines() == [
        "rank 0 |0F0-....2F0-........2B0=....0B0=|  50.0% busy",
        "rank 1 |....1F0-....3F0-3B0=....1B0=....|  50.0% busy",
        "span 8, bubble 50.0%, at most 2 live chunks on a rank",
    ]


def test_a_deadlock_of_ranks_with_several_stages_is_shown() -> None:
    schedule = read((0,), "2F0 0F0", "1F0 3F0", loss="each", num_virtual=2)
    assert format_grid(schedule).splitlines() == [
        "rank 0  2F0? 0F0?",
        "rank 1  1F0? 3F0?",
    ]
