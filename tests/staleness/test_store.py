"""Histories: unwritten rows, drift, snapshots."""

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
        store.pull("h", plan.chunks[0], torch.empty(2, 1))


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


def test_a_snapshot_serves_stale_reads_until_it_is_renewed(plan: ChunkPlan) -> None:
    """Snapshots of an exact step 0, and of every second one: 1, 3."""
    store = HistoryStore(5, 2)
    whole, read = plan.whole.chunks[0], []
    for step in range(5):
        store.begin_step(step)
        store.before_forward(is_exact=step == 0, reads_snapshot=True)
        if step:
            read.append(float(store.rows("h").mean()))
        store.push("h", whole, torch.full((5, 1), float(step)))
        store.after_forward(takes_snapshot=step in (0, 1, 3))
    assert read == [0, 1, 1, 3]
    store.push("h", whole, torch.full((5, 1), 4.0))
    store.on_renewed()
    store.push("h", whole, torch.full((5, 1), 9.0))
    store.before_forward(is_exact=False, reads_snapshot=True)
    assert store.rows("h").mean() == 4
    store.before_forward(is_exact=False, reads_snapshot=False)
    assert store.save("h")["kept"] is None
