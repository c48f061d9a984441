"""Schedules of many shapes: R ranks of V stages each, M micro-batches; and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random

from hypothesis import strategies as st

from lightning_gnnpipe.schedule import Action, Schedule, fill_drain, interleaved, stream

SHAPES = [*product(range(1, 5), range(1, 4), range(1, 12))]
"""(R, V, M): fewer and more micro-batches than ranks, multiples and others."""

seeds = st.integers(0, 10**6)


def build_all(num_ranks: int, num_virtual: int, num_micro_batches: int) -> Iterator[Schedule]:
    """Yield every schedule of a shape that has a backward phase."""
    num_stages, order = num_ranks * num_virtual, range(num_micro_batches)
    yield fill_drain(num_stages, order, loss="all", num_virtual=num_virtual)
    yield fill_drain(num_stages, order, loss="each", num_virtual=num_virtual)
    yield interleaved(num_ranks, num_virtual, num_micro_batches)


def forward_only(num_ranks: int, num_virtual: int, num_micro_batches: int) -> Schedule:
    return stream(num_ranks * num_virtual, [num_micro_batches], num_virtual=num_virtual)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    return draw(st.sampled_from([*build_all(*shape), forward_only(*shape)]))


def random_cost(seed: int, most_of_transfer: int = 9) -> Callable[[Action], float]:
    """Return a cost that differs from action to action, and may be 0."""

    def cost(action: Action) -> float:
        most = 9 if action.op.is_compute else most_of_transfer
        return float(Random(f"{seed} {action}").randint(0, most))

    return cost
