"""Schedules as fixed-width text: a grid of unit steps, and a chart to scale in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_gnnpipe.schedule.action import Action
from lightning_gnnpipe.schedule.simulate import simulate_until_stuck

if TYPE_CHECKING:
    from lightning_gnnpipe.schedule.build import Schedule
    from lightning_gnnpipe.schedule.simulate import Timeline


def format_grid(schedule: Schedule, *, bad: Action | None = None) -> str:
    """Return one line per rank and one column per unit step, with the chunk computed in that step.

    An idle cell is `.`. A deadlocked schedule is shown as far as it runs, followed by the remaining
    actions of each rank, marked `?`. With one stage per rank, lines are named after stages::

        stage 0  F0  F1  .   .   B1  B0
        stage 1  .   F0  F1  B1  B0* .

    With several stages per rank, each cell starts with the stage::

        rank 0  0F0 0F1 2F0 2F1 2B0 ...

    Args:
        schedule: Schedule to show; transfers have no column.
        bad: Action to mark with `*`. For a transfer, its compute action is marked. An action
            without a cell is named on a line of its own.
    """
    timeline, _ = simulate_until_stuck(schedule)
    rows = [["."] * round(timeline.span) for _ in schedule.ranks]
    rest = [[each for each in rank if each.op.is_compute] for rank in schedule.ranks]
    marked = None if bad is None else bad.served
    names_stage = schedule.num_virtual > 1

    def cell(action: Action) -> str:
        return _cell(action, names_stage) + ("*" if action == marked else "")

    for event in timeline.events:
        if event.action.op.is_compute:
            rows[event.rank][round(event.start)] = cell(event.action)
            rest[event.rank].remove(event.action)
    for row, never_ran in zip(rows, rest, strict=True):
        row += [cell(action) + "?" for action in never_ran]
    labels = [schedule.row_label(rank) for rank in range(schedule.num_ranks)]
    label_width = max(map(len, labels))
    width = max((len(text) for row in rows for text in row), default=0)
    lines = [
        f"{label:{label_width}}  {' '.join(text.ljust(width) for text in row)}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]
    if marked is not None and not any("*" in line for line in lines):
        lines.append(f"* {bad} is not in the schedule")
    return "\n".join(lines)


def format_chart(timeline: Timeline, *, width: int = 72) -> str:
    """Return one line per rank with its actions to scale, and a line of totals.

    `F0---` is the forward of chunk 0, `B0===` its backward, `.` is idle time. With several stages
    per rank, the stage comes first: `2F0---`::

        stage 0 |F0--F1--............B1======B0======|  66.7% busy
        stage 1 |....F0--F1--B1======B0======........|  66.7% busy
        span 9, bubble 33.3%, at most 2 live chunks on a stage

    Args:
        timeline: Result of `simulate`.
        width: Columns of the time axis. An action shorter than a column may vanish.
    """
    scale = width / timeline.span if timeline.span else 0.0
    rows = [["."] * width for _ in timeline.busy]
    names_stage = any(event.action.stage >= len(rows) for event in timeline.events)
    for event in timeline.events:
        if event.action.op.is_compute:
            first, end = round(event.start * scale), round(event.end * scale)
            fill = "=" if event.action.op.is_backward else "-"
            text = _cell(event.action, names_stage).ljust(end - first, fill)
            rows[event.rank][first:end] = text[: end - first]
    name = "rank" if names_stage else "stage"
    label = len(f"{name} {len(rows) - 1}")
    lines = []
    for rank, (row, busy) in enumerate(zip(rows, timeline.busy, strict=True)):
        busy_frac = busy / timeline.span if timeline.span else 0.0
        lines.append(f"{f'{name} {rank}':{label}} |{''.join(row)}|  {busy_frac:.1%} busy")
    lines.append(
        f"span {timeline.span:g}, bubble {timeline.bubble_frac:.1%}, "
        f"at most {max(timeline.peak_live)} live chunks on a {name}"
    )
    return "\n".join(lines)


def _cell(action: Action, names_stage: bool) -> str:
    return str(action) if names_stage else f"{action.op.value}{action.chunk}"
