"""Schedules as lists of strings, one a stage, and the strategies that draw schedules."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from lightning_gnnpipe.schedule import Action, Schedule

num_stages = st.integers(1, 6)
orders = st.integers(1, 12).flatmap(lambda num_chunks: st.permutations(range(num_chunks)))


def read(order: Sequence[int], *lines: str) -> Schedule:
    """Return the schedule written as one line of actions a stage."""
    ranks = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    return Schedule(len(lines), tuple(order), ranks)


def write(schedule: Schedule) -> list[str]:
    """Return one line of actions a stage."""
    return [" ".join(map(str, rank)) for rank in schedule.ranks]
