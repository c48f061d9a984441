"""Programs that are drawn give the same under the strategy works, or are refused in words."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.differential.draw import draw_of
from tests.differential.habits import HABITS
from tests.differential.nets import GraphDraw, NetDraw
from tests.differential.program import SETTINGS, Habit, script_of
from tests.differential.workers import run_tasks

LIMIT_S = 120.0


def failures(seeds: range) -> list[str]:
    """Return what fails, each with its program."""
    tasks = [(draw_of(seed), None) for seed in seeds]
    findings = [one for found in run_tasks(tasks, 2, LIMIT_S) for one in found]
    assert {finding.kind for finding in findings} & {"equal"}
    return [
        f"{one.kind}: {one.text[:2000]}\n{script_of(one.draw, one.setting)}"
        for one in findings
        if one.is_failure
    ]


@pytest.mark.slow
def test_many_draws() -> None:
    assert failures(range(500)) == []


def test_weights_that_autograd_has_saved_outlast_a_new_trace_before_backward() -> None:
    names = ("_dict", "net in eval for a pass", "weight penalty")
    habits = tuple(habit for habit in HABITS if habit.name in names)
    drawn = replace(draw_of(225), net=NetDraw(("GCN", "GCN")), graph=GraphDraw(), habits=habits)
    [[found]] = run_tasks([(drawn, SETTINGS["exact, two stages"])], 1, LIMIT_S)
    assert found.kind == "equal", found.text


def test_every_program_can_be_read() -> None:
    for seed in range(2 * len(HABITS)):
        draw = draw_of(seed)
        for setting in draw.settings():
            ast.parse(script_of(draw, setting))


def test_every_habit_is_drawn() -> None:
    drawn = {habit.name for seed in range(len(HABITS)) for habit in draw_of(seed).habits}
    assert drawn == {habit.name for habit in HABITS}
    assert len({habit.name for habit in HABITS}) == len(HABITS)


FAULTS = {
    "differs": "loss = 2 * loss",
    "error": "raise KeyError('bare')",
    "wait": "import time\n    time.sleep(60)",
    "refused": "from lightning_gnnpipe import errors\n    raise errors.ConfigError('in words')",
}
"""What a program does under the strategy only, by what it has to be reported as."""


def test_faults_are_found() -> None:
    seed = next(seed for seed in range(99) if not draw_of(seed).net.dropout)
    tasks = []
    for kind, lines in FAULTS.items():
        slots = {"loss": f"if 'Pipe' in type(self.trainer.strategy).__name__:\n    {lines}"}
        draw = replace(draw_of(seed), habits=(Habit(kind, slots),))
        tasks.append((draw, SETTINGS["one chunk"]))
    found = [one for [one] in run_tasks(tasks, 2, limit_s=8)]
    assert {one.draw.habits[0].name: one.kind for one in found} == {kind: kind for kind in FAULTS}
