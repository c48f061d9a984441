"""Histories: push, pull, ages, gradient buffers, snapshots."""

from __future__ import annotations

import pytest
import torch

from lightning_gnnpipe.graph import ChunkPlan, plan_from_assignment
from lightning_gnnpipe.history import (
    DelayedGradients,
    DroppedGradients,
    HistoryOptions,
    HistoryStore,
    RenewedRows,
    SnapshotRows,
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
    whole = torch.arange(5.0).view(5, 1)
    store.push("h", plan.whole.chunks[0], whole)
    out = torch.empty(2, 1)
    store.pull("h", first, out)
    assert out.flatten().tolist() == [3, 4]
    store.step = 1
    store.push("h", second, torch.tensor([[12.0], [13.0], [14.0]]))
    store.pull("h", first, out)
    assert out.flatten().tolist() == [13, 14]


def test_an_unwritten_row_is_never_read(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2)
    store.push("h", plan.chunks[0], torch.zeros(2, 1))
    with pytest.raises(AssertionError, match="unwritten"):
        store.pull("h", plan.chunks[0], torch.empty(2, 1))


def test_gradients_wait_for_their_rows_and_are_scaled(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(DroppedGradients(scale=2.0))))
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    assert store.pull_grad("h", plan.chunks[1]) is None
    store.push_grad("h", plan.chunks[0], torch.tensor([[1.0], [5.0]]))
    grad = store.pull_grad("h", plan.chunks[1])
    assert grad is not None and grad.flatten().tolist() == [0, 2, 10]
    store.end_step(is_exact=False)
    assert store.pull_grad("h", plan.chunks[1]) is None


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


def test_a_snapshot_serves_stale_reads_until_it_is_renewed(plan: ChunkPlan) -> None:
    """Snapshots of an exact step 0, and of every second one: 1, 3."""
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(reads=SnapshotRows(2))))
    whole, read = plan.whole.chunks[0], []
    for step in range(5):
        store.begin_step(step)
        store.before_forward(is_exact=step == 0)
        if step:
            read.append(float(store.rows("h").mean()))
        store.push("h", whole, torch.full((5, 1), float(step)))
        store.after_forward(is_exact=step == 0)
    assert read == [0, 1, 1, 3]
    store.push("h", whole, torch.full((5, 1), 4.0))
    store.on_renewed()
    store.push("h", whole, torch.full((5, 1), 9.0))
    store.before_forward(is_exact=False)
    assert store.rows("h").mean() == 4


@pytest.fixture
def noisy() -> HistoryStore:
    return HistoryStore(5, 2, HistoryOptions(StalenessMethod(reads=RenewedRows(noise=0.5))))


def renew(store: HistoryStore, plan: ChunkPlan, value: float) -> float:
    """Write `value` by a pass that renews rows; return what a stale read then returns."""
    store.push("h", plan.whole.chunks[0], torch.full((5, 1), value))
    store.on_renewed()
    return float(store.rows("h").mean())


def train(store: HistoryStore, plan: ChunkPlan, value: float) -> None:
    """Write `value` in a training step."""
    store.before_forward(is_exact=False)
    store.push("h", plan.whole.chunks[0], torch.full((5, 1), value))
    store.after_forward(is_exact=False)


def test_renewed_rows_have_half_of_the_last_noise(plan: ChunkPlan, noisy: HistoryStore) -> None:
    train(noisy, plan, 7.0)  # before the first pass it is not known
    assert renew(noisy, plan, 10.0) == 10
    train(noisy, plan, 12.0)
    assert renew(noisy, plan, 11.0) == 11 + 0.5 * (12 - 10)
    train(noisy, plan, 9.0)
    train(noisy, plan, 90.0)  # without a pass before it
    assert renew(noisy, plan, 20.0) == 20 + 0.5 * (9 - 11)


def test_rows_that_a_pass_has_not_written_are_not_renewed(
    plan: ChunkPlan, noisy: HistoryStore
) -> None:
    """As of a layer that is called in training alone."""
    for value in (1.0, 2.0, 3.0):
        noisy.push("training", plan.whole.chunks[0], torch.full((5, 1), value))
        train(noisy, plan, value)
        renew(noisy, plan, value)
        assert noisy.rows("training").mean() == value


def test_gradients_wait_a_step(plan: ChunkPlan) -> None:
    """Chunk 0 comes first and reads nodes 3 and 4 stale; what it has for them waits."""
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(DelayedGradients(0.5))))
    first, second = plan.chunks
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    taken = []
    for grad in (8.0, 16.0, 0.0):
        found = store.pull_grad("h", second)
        taken.append(None if found is None else found.flatten().tolist())
        store.push_grad("h", first, torch.full((2, 1), grad))
        fresh = store.pull_grad("h", second)  # had it come after chunk 0
        assert fresh is not None and fresh.flatten().tolist() == [0, grad, grad]
        store.end_step(is_exact=False)
    assert taken == [None, [0, 4, 4], [0, 8, 8]]
    store.end_step(is_exact=True)
    assert store.pull_grad("h", second) is None


def test_what_is_in_time_is_scaled_and_what_waits_is_not(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(DelayedGradients(0.5, scale=1.5))))
    first, second = plan.chunks
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    store.push_grad("h", first, torch.full((2, 1), 8.0))
    in_time = store.pull_grad("h", second)
    store.end_step(is_exact=False)
    late = store.pull_grad("h", second)
    assert in_time is not None and in_time.flatten().tolist() == [0, 12, 12]
    assert late is not None and late.flatten().tolist() == [0, 4, 4]


def test_what_waits_may_be_of_another_dtype(plan: ChunkPlan) -> None:
    """As where a run goes on under autocast."""
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(DelayedGradients())))
    first, second = plan.chunks
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    for grad, dtype in ((8.0, torch.float32), (16.0, torch.bfloat16)):
        store.push_grad("h", first, torch.full((2, 1), grad, dtype=dtype))
        store.add_output_grad("h", first, torch.full((2, 1), grad, dtype=dtype))
        store.end_step(is_exact=False)
    late = store.pull_grad("h", second)
    assert late is not None and late.flatten().tolist() == [0, 16, 16]


@pytest.mark.parametrize(("loss_scale", "factor"), [(1.0, 1), (4.0, 4), (0.5, 0)])
def test_what_waits_follows_the_loss_scale(
    plan: ChunkPlan, loss_scale: float, factor: float
) -> None:
    """A lower scale says that the last gradients have overflowed: they are dropped."""
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(DelayedGradients())))
    first, second = plan.chunks
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    for _ in range(2):
        store.push_grad("h", first, torch.full((2, 1), 8.0))
        store.add_output_grad("h", first, torch.full((2, 1), 8.0))
        store.add_output_grad("h", second, torch.full((3, 1), 8.0))
        store.end_step(is_exact=False)
    store.rescale(loss_scale)
    late = store.pull_grad("h", second)
    assert (late is None) == (factor == 0)
    assert late is None or late.flatten().tolist() == [0, 8 * factor, 8 * factor]
    table, _ = store.add_output_grad("h", second, torch.full((3, 1), 1.0))
    assert table[:2].flatten().tolist() == [8 * factor, 8 * factor]


def test_a_layer_that_has_no_gradients_for_a_while_leaves_none(plan: ChunkPlan) -> None:
    """As one that is frozen; of two chunks the one that comes again is given nothing old."""
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(DelayedGradients())))
    first, second = plan.chunks
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    for chunks in ((first, second), (second,), ()):
        for chunk in chunks:
            store.push_grad("h", chunk, torch.ones(chunk.num_halo, 1))
            store.add_output_grad("h", chunk, torch.ones(chunk.end - chunk.start, 1))
        store.end_step(is_exact=False)
        for_second, for_first = store.pull_grad("h", second), store.pull_grad("h", first)
        assert (for_second is not None and bool(for_second.any())) == (first in chunks)
        assert (for_first is not None and bool(for_first.any())) == (second in chunks)
    table, _ = store.add_output_grad("h", second, torch.full((3, 1), 1.0))
    assert table[:2].abs().sum() == 0


def test_gradients_of_outputs_wait_a_step(plan: ChunkPlan) -> None:
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(DelayedGradients(0.5))))
    first, second = plan.chunks
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 1))
    seen = []
    for grad in (8.0, 16.0, 0.0):
        table, done = store.add_output_grad("h", second, torch.full((3, 1), 1.0))
        assert done is None and table[2:].flatten().tolist() == [1, 1, 1]
        seen.append(table[:2].flatten().tolist())
        store.add_output_grad("h", first, torch.full((2, 1), grad))
        store.end_step(is_exact=False)
    assert seen == [[0, 0], [4, 4], [8, 8]]
    store.end_step(is_exact=True)
    table, _ = store.add_output_grad("h", second, torch.full((3, 1), 1.0))
    assert table[:2].abs().sum() == 0


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
    assert store.by_chunk.pull_grad("share", first) == 3
    store.end_step(is_exact=False)
    assert store.by_chunk.pull_grad("share", first) is None
