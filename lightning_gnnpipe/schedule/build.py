"""A step as data, `Schedule`, and fill-drain: stages and chunk order in, a list a rank out.

All chunks flow forward through all stages, then all flow back. It is the one schedule for a loss
that needs the outputs of all chunks, and the one for chunks of a single graph, which depend on each
other: there they flow back in reverse order, so that every chunk that read a chunk's fresh rows
goes back before that chunk does, and gradients that cross chunks are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.format import format_grid

Loss = Literal["all", "each"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank does in one step, in order; prints as a grid.

    Stages are assigned to ranks in turn, one round of them a virtual stage::

        stage = virtual * num_ranks + rank

    Attributes:
        num_stages: Number of stages.
        order: The chunk order of the forward phase, a permutation of `range(num_chunks)`. A chunk
            is a part of the graph, or a micro-batch of many graphs.
        ranks: For each rank its actions, in the order in which it runs them.
        loss: What a loss needs before gradients can flow back: `"all"`, the outputs of all chunks;
            `"each"`, those of its own chunk, which is independent of the others. With `"all"` every
            stage goes back through the chunks in reverse order, for the sake of chunks that are
            dependent. With `"each"` it goes back in the order of the forward phase, as 1F1B must:
            so the gradients of a weight are summed in one order by all schedules and any number of
            stages, that of plain accumulation on one device. The peak of memory of fill-drain is
            the same for both, as all chunks are held at the loss.
        num_virtual: Stages of each rank.

    Raises:
        ScheduleError: If there is no stage, `order` is no permutation, `loss` is unknown, or a rank
            has no list.
    """

    num_stages: int
    order: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    loss: Loss = "all"
    num_virtual: int = 1

    def __post_init__(self) -> None:
        """Check the shape; what the lists hold is for `check` to judge."""
        require_order(self.order)
        if self.num_stages < 1 or len(self.ranks) * self.num_virtual != self.num_stages:
            raise ScheduleError(
                explain(
                    expected=f"'num_stages' to be at least 1, and {self.num_virtual} for each list "
                    "of actions",
                    found=f"{self.num_stages} stages, {len(self.ranks)} lists",
                    remedy="Build schedules with 'fill_drain', 'one_f_one_b' or 'interleaved'.",
                )
            )
        if self.loss not in get_args(Loss):
            raise ScheduleError(
                explain(
                    expected="'loss' to be 'all' or 'each'",
                    found=repr(self.loss),
                    remedy="Say whether a loss needs the outputs of all chunks, or of its own.",
                )
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.order)

    @property
    def backward_order(self) -> tuple[int, ...]:
        """The chunk order of the backward phase, on every stage."""
        return self.order[::-1] if self.loss == "all" else self.order

    @property
    def has_backward(self) -> bool:
        """Whether any action belongs to the backward phase."""
        return any(action.op.is_backward for rank in self.ranks for action in rank)

    @property
    def has_transfers(self) -> bool:
        """Whether any action is a send or a receive."""
        return any(not action.op.is_compute for rank in self.ranks for action in rank)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage`."""
        return stage % self.num_ranks

    def crosses_ranks(self, stage: int, other: int) -> bool:
        """Return whether data from `stage` to `other`, its neighbour, goes to another rank.

        It does not if there is no stage `other`.
        """
        return 0 <= other < self.num_stages and self.rank_of(stage) != self.rank_of(other)

    def row_label(self, rank: int) -> str:
        """Return what a person calls `rank`: by its stage, if it has only one."""
        return f"{'stage' if self.num_virtual == 1 else 'rank'} {rank}"

    def forward(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of the forward phase of `rank`, in order."""
        return tuple(action for action in self.ranks[rank] if not action.op.is_backward)

    def backward(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of the backward phase of `rank`, in order."""
        return tuple(action for action in self.ranks[rank] if action.op.is_backward)

    def __str__(self) -> str:
        """Return the grid of `format_grid`."""
        return format_grid(self)


def fill_drain(
    num_stages: int,
    order: Sequence[int],
    *,
    backward: bool = True,
    loss: Loss = "all",
    num_virtual: int = 1,
) -> Schedule:
    """Return the schedule in which all chunks go forward in `order`, then all go back.

    Three stages, three chunks in the order 2, 0, 1. The loss needs the outputs of all chunks, so no
    chunk goes back before the last one has come out::

        stage 0  F2 F0 F1 .  .  .  .  B1 B0 B2
        stage 1  .  F2 F0 F1 .  .  B1 B0 B2 .
        stage 2  .  .  F2 F0 F1 B1 B0 B2 .  .

    Exact mode is the same schedule of a plan with one chunk: `fill_drain(num_stages, (0,))`.

    A rank with several stages takes all chunks through the first of them, then all through the
    second, and back the other way round ("breadth-first"). With equal costs the share of idle time
    is that of `interleaved`; all chunks are held on all stages at the loss.

    Args:
        num_stages: Number of stages, at least 1.
        order: The chunk order, a permutation of `range(num_chunks)`.
        backward: Whether to add the backward phase; not for validation, test and predict.
        loss: What a loss needs, see `Schedule`: with `"all"` chunks go back in reverse order, with
            `"each"` in `order`.
        num_virtual: Stages of each rank, of which `num_stages` is a multiple.

    Returns:
        Compute actions only; `add_transfers` adds the sends and receives.

    Raises:
        ScheduleError: If there is no stage, `order` is no permutation, or stages cannot be
            assigned.

    Source: GPipe (arXiv 1811.06965) for the schedule; GNNPipe (arXiv 2308.10087) for its use on
        the chunks of one graph; Lamy-Poirier, "Breadth-First Pipeline Parallelism" (arXiv
        2211.05953), for several stages a rank.
    """
    require_positive("num_virtual", num_virtual)
    num_ranks = num_stages // num_virtual
    back = order if loss == "each" else order[::-1]
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        actions = [Action(stage, Op.F, chunk) for stage in stages for chunk in order]
        if backward:
            actions += [Action(stage, Op.B, chunk) for stage in stages[::-1] for chunk in back]
        ranks.append(tuple(actions))
    return Schedule(num_stages, tuple(order), tuple(ranks), loss, num_virtual)


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


def require_positive(name: str, number: int) -> None:
    """Check that the argument `name` is at least 1.

    Raises:
        ScheduleError: If it is not.
    """
    if number < 1:
        raise ScheduleError(
            explain(
                expected=f"'{name}' to be at least 1",
                found=str(number),
                remedy="It counts what takes part in a step.",
            )
        )
