"""Schedules as lists of strings, one a rank, and the strategies that draw schedules."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from lightning_gnnpipe.schedule import Action, Loss, Schedule

num_stages = st.integers(1, 6)
orders = st.integers(1, 12).flatmap(lambda num_chunks: st.permutations(range(num_chunks)))


def read(order: Sequence[int], *lines: str, loss: Loss = "all", num_virtual: int = 1) -> Schedule:
    """Return the schedule written as one line of actions a rank."""
    ranks = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    return Schedule(len(lines) * num_virtual, tuple(order), ranks, loss, num_virtual)


def write(schedule: Schedule) -> list[str]:
    """Return one line of actions a rank."""
    return [" ".join(map(str, rank)) for rank in schedule.ranks]
