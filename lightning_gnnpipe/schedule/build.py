"""Build the fill-drain schedule of a step: number of stages and chunk order in, `Schedule` out.

All chunks flow forward through all stages, then all flow back in reverse order. The reversal is
what makes gradients that cross chunks exact: every chunk that read a chunk's fresh rows goes back
before that chunk does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.format import format_grid


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every stage does in one step, in order; prints as a grid.

    Attributes:
        num_stages: Number of stages.
        order: The chunk order of the forward phase, a permutation of `range(num_chunks)`.
        ranks: For each stage its actions, in the order in which it runs them.

    Raises:
        ScheduleError: If there is no stage, `order` is no permutation, or a stage has no list.
    """

    num_stages: int
    order: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        """Check the shape; what the lists hold is for `check` to judge."""
        require_order(self.order)
        if self.num_stages < 1 or len(self.ranks) != self.num_stages:
            raise ScheduleError(
                explain(
                    expected="'num_stages' to be at least 1, and one list of actions a stage",
                    found=f"{self.num_stages} stages, {len(self.ranks)} lists",
                    remedy="Build schedules with 'fill_drain(num_stages, order)'.",
                )
            )

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.order)

    @property
    def has_backward(self) -> bool:
        """Whether any action belongs to the backward phase."""
        return any(action.op.is_backward for rank in self.ranks for action in rank)

    @property
    def has_transfers(self) -> bool:
        """Whether any action is a send or a receive."""
        return any(not action.op.is_compute for rank in self.ranks for action in rank)

    def forward(self, stage: int) -> tuple[Action, ...]:
        """Return the actions of the forward phase of `stage`, in order."""
        return tuple(action for action in self.ranks[stage] if not action.op.is_backward)

    def backward(self, stage: int) -> tuple[Action, ...]:
        """Return the actions of the backward phase of `stage`, in order."""
        return tuple(action for action in self.ranks[stage] if action.op.is_backward)

    def __str__(self) -> str:
        """Return the grid of `format_grid`."""
        return format_grid(self)


def fill_drain(num_stages: int, order: Sequence[int], *, backward: bool = True) -> Schedule:
    """Return the schedule in which all chunks go forward in `order`, then back in reverse order.

    Three stages, three chunks in the order 2, 0, 1. The loss needs the outputs of all chunks, so no
    chunk goes back before the last one has come out::

        stage 0  F2 F0 F1 .  .  .  .  B1 B0 B2
        stage 1  .  F2 F0 F1 .  .  B1 B0 B2 .
        stage 2  .  .  F2 F0 F1 B1 B0 B2 .  .

    Exact mode is the same schedule of a plan with one chunk: `fill_drain(num_stages, (0,))`.

    Args:
        num_stages: Number of stages, at least 1.
        order: The chunk order, a permutation of `range(num_chunks)`.
        backward: Whether to add the backward phase; not for validation, test and predict.

    Returns:
        Compute actions only; `add_transfers` adds the sends and receives.

    Raises:
        ScheduleError: If there is no stage or `order` is no permutation.

    Source: GPipe (arXiv 1811.06965) for the schedule; GNNPipe (arXiv 2308.10087) for its use on
        the chunks of one graph.
    """
    ranks = []
    for stage in range(num_stages):
        actions = [Action(stage, Op.F, chunk) for chunk in order]
        if backward:
            actions += [Action(stage, Op.B, chunk) for chunk in reversed(order)]
        ranks.append(tuple(actions))
    return Schedule(num_stages, tuple(order), tuple(ranks))


def require_order(order: Sequence[int]) -> None:
    """Check that `order` is a permutation of `range(len(order))`, of one chunk or more.

    Raises:
        ScheduleError: If it is not.
    """
    if not order or sorted(order) != list(range(len(order))):
        raise ScheduleError(
            explain(
                expected="'order' to hold each of the chunks 0, 1, ..., num_chunks - 1 once",
                found=str(tuple(order)),
                remedy="Give a permutation of range(num_chunks), such as (2, 0, 1).",
            )
        )
