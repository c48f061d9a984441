"""Drift in numbers: sums over rows, over histories and ranks, against plain torch."""

from __future__ import annotations

import pytest
import torch

from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.staleness import HistoryStore, Staleness, StalenessRecorder

# Chunks of 1, 4 and 2 nodes in plan order, and one isolated node alone; a ring over the others.
BOUNDS = [0, 1, 5, 7, 8]
ASSIGNMENT = torch.tensor([0, 1, 1, 1, 1, 2, 2, 3])
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]])


def table(seed: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, width, generator=generator, dtype=torch.float64)


def record(keys: dict[str, int], *, is_exact: bool) -> StalenessRecorder:
    """Return what is recorded when each history, of a width, is written a second time."""
    plan = plan_from_assignment(EDGES, 8, ASSIGNMENT)
    store = HistoryStore(8, 4)
    for key, width in keys.items():
        store.push(key, plan.whole.chunks[0], table(width, width))
    store.begin_step(1)
    store.recorder = StalenessRecorder()
    for chunk in plan.whole.chunks if is_exact else plan.chunks[::-1]:
        for key, width in keys.items():
            store.push(key, chunk, table(width + 50, width)[chunk.start : chunk.end])
    return store.recorder


@pytest.mark.parametrize("is_exact", [False, True])
def test_drift_equals_plain_torch(is_exact: bool) -> None:
    keys = {"first": 3, "second": 5}
    recorder, total = record(keys, is_exact=is_exact), Staleness()
    for one in recorder.by_key.values():
        total.add(one)
    stale = [table(width, width) for width in keys.values()]
    fresh = [table(width + 50, width) for width in keys.values()]
    drift_sq = sum(float((new - old).square().sum()) for new, old in zip(fresh, stale, strict=True))
    norm_sq = sum(float(new.square().sum()) for new in fresh)
    assert total.drift == pytest.approx((drift_sq / norm_sq) ** 0.5, abs=1e-10)


def test_rows_that_are_zero_have_no_drift() -> None:
    assert Staleness().drift == 0


def test_sums_leave_what_is_added_as_it_was() -> None:
    first, second = Staleness(drift_sq=1.0, norm_sq=4.0), Staleness(drift_sq=5.0, norm_sq=14.0)
    first.add(second)
    assert (second.drift_sq, second.norm_sq) == (5.0, 14.0)
    assert (first.drift_sq, first.norm_sq) == (6.0, 18.0)
