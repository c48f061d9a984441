"""Drift in numbers: sums over rows, by chunk, over histories and ranks, against plain torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.history import HistoryStore, Staleness, StalenessRecorder

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


def test_drift_of_chunks_equals_plain_torch() -> None:
    keys = {"first": 3, "second": 5}
    recorder, total = record(keys, is_exact=False), Staleness()
    for one in recorder.by_key.values():
        total.add(one)
    drift_sq, norm_sq = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for width in keys.values():
        stale, fresh = table(width, width), table(width + 50, width)
        for c, (start, end) in enumerate(pairwise(BOUNDS)):
            drift_sq[c] += (fresh - stale)[start:end].pow(2).sum()
            norm_sq[c] += fresh[start:end].pow(2).sum()
    expected = (drift_sq / norm_sq).sqrt().tolist()
    assert list(total.drift_of_chunk) == [0, 1, 2, 3]
    assert list(total.drift_of_chunk.values()) == pytest.approx(expected, abs=1e-10)
    assert total.drift == pytest.approx(float(drift_sq.sum() / norm_sq.sum()) ** 0.5, abs=1e-10)


def test_an_exact_pass_is_in_the_sums_over_all_rows_only() -> None:
    exact = record({"h": 3}, is_exact=True).by_key["h"]
    chunked = record({"h": 3}, is_exact=False).by_key["h"]
    assert exact.drift == pytest.approx(chunked.drift, abs=1e-10)
    assert exact.drift_of_chunk == {}


def test_rows_that_are_zero_have_no_drift() -> None:
    one = Staleness()
    one.add_drift(2, 0.0, 0.0)
    assert one.drift_of_chunk == {2: 0.0}
    assert Staleness().drift_of_chunk == {}


def test_sums_leave_what_is_added_as_it_was() -> None:
    first, second = Staleness(), Staleness()
    first.add_drift(0, 1.0, 4.0)
    second.add_drift(0, 3.0, 12.0)
    second.add_drift(1, 2.0, 2.0)
    first.add(second)
    assert first.drift_of_chunk == {0: 0.5, 1: 1.0}
    assert second.drift_of_chunk == {0: 0.5, 1: 1.0}
    assert (first.drift_sq, first.norm_sq) == (6.0, 18.0)
