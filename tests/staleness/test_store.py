"""Histories: push, pull, ages, drift, gradient buffers, snapshots."""

from __future__ import annotations

import pytest
import torch

from lightning_gnnpipe.graph import ChunkPlan, plan_from_assignment
from lightning_gnnpipe.staleness import (
    HistoryOptions,
    HistoryStore,
    Staleness,
    StalenessMethod,
    StalenessRecorder,
)

# Chunk 0 = nodes 0, 1; chunk 1 = nodes 2, 3, 4. Edges 0 -> 2, 4 -> 1, 3 -> 1.
EDGES = torch.tensor([[0, 4, 3], [2, 1, 1]])
ASSIGNMENT = torch.tensor([0, 0, 1, 1, 1])


@pytest.fixture
def plan() -> ChunkPlan:
    return plan_from_assignment(EDGES, 5, ASSIGNMENT)


def test_pull_gives_what_was_pushed_last(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2)
    first, second = plan.chunks
    store.push("h", plan.whole.chunks[0], torch.arange(5.0).view(5, 1))
    out = torch.empty(2, 1)
    store.pull("h", first, out)
    assert out.flatten().tolist() == [3, 4]
    store.step = 1
    store.push("h", second, torch.tensor([[12.0], [13.0], [14.0]]))
    store.pull("h", first, out)
    assert out.flatten().tolist() == [13, 14]
    store.push("new", first, torch.zeros(2, 1))
    with pytest.raises(AssertionError, match="unwritten"):
        store.pull("new", first, out)


def test_gradients_wait_for_their_rows_and_are_scaled(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(linear_scale=2.0, message_scale=2.0)))
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    assert store.pull_grad("h", plan.chunks[1], is_linear=True) is None
    store.push_grad("h", plan.chunks[0], torch.tensor([[1.0], [5.0]]))
    grad = store.pull_grad("h", plan.chunks[1], is_linear=True)
    assert grad is not None and grad.flatten().tolist() == [0, 2, 10]
    store.end_step()
    assert store.pull_grad("h", plan.chunks[1], is_linear=True) is None


def test_ages_and_drift_are_recorded(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2)
    store.push("h", plan.whole.chunks[0], torch.ones(5, 1))
    store.step, store.recorder = 3, StalenessRecorder()
    store.push("h", plan.chunks[0], torch.full((2, 1), 2.0))
    store.pull("h", plan.chunks[0], torch.empty(2, 1))
    store.push("h", plan.chunks[1], torch.ones(3, 1))
    store.pull("h", plan.chunks[1], torch.empty(1, 1))
    found = store.recorder.by_key["h"]
    assert (found.rows, found.stale_rows, found.age_sum) == (3, 2, 6)
    assert found.stale_pairs == [(0, 1)]
    assert found.drift == pytest.approx((2 / (8 + 3)) ** 0.5)


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


def test_a_history_may_have_one_row_a_chunk(plan: ChunkPlan) -> None:
    store, between = HistoryStore(5, 2), plan.between_chunks
    store.by_chunk.push("share", between.whole.chunks[0], torch.tensor([[1.0], [2.0]]))
    assert store.rows("share").shape == (2, 1)
    store.begin_step(1)
    store.recorder = StalenessRecorder()
    first, second = between.chunks
    out = torch.empty(1, 1)
    store.by_chunk.push("share", first, torch.tensor([[5.0]]))
    assert store.by_chunk.pull("share", first, out) == {1} and out.item() == 2
    store.by_chunk.push("share", second, torch.tensor([[7.0]]))
    assert store.by_chunk.pull("share", second, out) == set() and out.item() == 5
    assert store.recorder.by_key["share"].stale_pairs == [(0, 1)]
    store.by_chunk.push_grad("share", second, torch.tensor([[3.0]]))
    assert store.by_chunk.pull_grad("share", first, is_linear=True) == 3
    store.end_step()
    assert store.by_chunk.pull_grad("share", first, is_linear=True) is None
