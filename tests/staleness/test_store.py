"""Histories: unwritten rows, drift; `promises` have stale reads and snapshots."""

from __future__ import annotations

import pytest
import torch

from lightning_gnnpipe.graph import ChunkPlan, plan_from_assignment
from lightning_gnnpipe.staleness import HistoryStore, Staleness, StalenessRecorder

# Chunk 0 = nodes 0, 1; chunk 1 = nodes 2, 3, 4. Edges 0 -> 2, 4 -> 1, 3 -> 1.
EDGES = torch.tensor([[0, 4, 3], [2, 1, 1]])
ASSIGNMENT = torch.tensor([0, 0, 1, 1, 1])


@pytest.fixture
def plan() -> ChunkPlan:
    return plan_from_assignment(EDGES, 5, ASSIGNMENT)


def test_an_unwritten_row_is_never_read(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2)
    store.push("h", plan.chunks[0], torch.zeros(2, 1))
    with pytest.raises(AssertionError, match="unwritten"):
        store.read("h", plan.chunks[0])


@pytest.mark.parametrize("is_exact", [False, True])
def test_drift_of_several_histories_equals_plain_torch(plan: ChunkPlan, is_exact: bool) -> None:
    def table(seed: int, width: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(5, width, generator=generator, dtype=torch.float64)

    store, total, widths = HistoryStore(5, 2), Staleness(), {"first": 3, "second": 5}
    for key, width in widths.items():
        store.push(key, plan.whole.chunks[0], table(1, width))
    store.begin_step(1)
    store.recorder = StalenessRecorder()
    for chunk in plan.whole.chunks if is_exact else plan.chunks[::-1]:
        for key, width in widths.items():
            store.push(key, chunk, table(2, width)[chunk.start : chunk.end])
    assert total.drift == 0
    before = [(one.drift_sq, one.norm_sq) for one in store.recorder.by_key.values()]
    for one in store.recorder.by_key.values():
        total.add(one)
    assert before == [(one.drift_sq, one.norm_sq) for one in store.recorder.by_key.values()]
    stale, fresh = (
        torch.cat([table(seed, width) for width in widths.values()], 1) for seed in (1, 2)
    )
    expected = float((fresh - stale).norm() / fresh.norm())
    assert total.drift == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_drift_of_rows_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fresh, stale = torch.randn(2, 40, *shape).to(dtype)
    recorder = StalenessRecorder()
    recorder.record_drift("h", stale=stale, fresh=fresh)
    [found] = recorder.by_key.values()
    moved = (fresh - stale).double()  # rounded, as the rows are
    assert found.drift_sq == pytest.approx(float(moved.square().sum()), rel=1e-6)
    assert found.norm_sq == pytest.approx(float(fresh.double().square().sum()), rel=1e-6)
