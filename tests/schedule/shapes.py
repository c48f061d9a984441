"""Schedules as lists of strings, one for each rank; schedules of many shapes; what they cost.

A shape is (R, V, M): R ranks of V stages each, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random

from hypothesis import strategies as st

from lightning_gnnpipe.schedule import Action, Loss, Schedule, fill_drain, interleaved, stream

SHAPES = [*product(range(1, 5), range(1, 4), range(1, 12))]
"""Fewer and more micro-batches than ranks, multiples and others."""

seeds = st.integers(0, 10**6)
num_stages = st.integers(1, 6)
orders = st.integers(1, 12).flatmap(lambda num_chunks: st.permutations(range(num_chunks)))


def read(order: Sequence[int], *lines: str, loss: Loss = "all", num_virtual: int = 1) -> Schedule:
    """Return the schedule of these lines of actions."""
    ranks = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    return Schedule(len(lines) * num_virtual, tuple(order), ranks, loss, num_virtual)


def write(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, rank)) for rank in schedule.ranks]


def build_all(
    num_ranks: int, num_virtual: int, num_micro_batches: int, order: Sequence[int] | None = None
) -> Iterator[Schedule]:
    """Yield every schedule of a shape that has a backward phase."""
    num_stages, order = num_ranks * num_virtual, order or range(num_micro_batches)
    yield fill_drain(num_stages, order, loss="all", num_virtual=num_virtual)
    yield fill_drain(num_stages, order, loss="each", num_virtual=num_virtual)
    yield interleaved(num_ranks, num_virtual, num_micro_batches)


def forward_only(num_ranks: int, num_virtual: int, num_micro_batches: int) -> Schedule:
    return stream(num_ranks * num_virtual, [num_micro_batches], num_virtual=num_virtual)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    order = draw(orders)
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 3)), len(order)
    inference = fill_drain(shape[0] * shape[1], order, backward=False, num_virtual=shape[1])
    return draw(st.sampled_from([*build_all(*shape, order), forward_only(*shape), inference]))


def random_cost(seed: int, most_of_transfer: int = 9) -> Callable[[Action], float]:
    """Return a cost that differs from action to action, and may be 0."""

    def cost(action: Action) -> float:
        most = 9 if action.op.is_compute else most_of_transfer
        return float(Random(f"{seed} {action}").randint(0, most))

    return cost
