"""Chunks that go first: the oracle holds; drift by chunk is the same for any stages and shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_gnnpipe import DelayedGradients, StalenessMonitor
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.history import METHODS
from lightning_gnnpipe.types import StalenessName
from tests.helpers.engines import one_process_engine
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import SEED, FitResult, run_fit
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import assert_steps_equal
from tests.helpers.reference import Delay
from tests.helpers.training import Refresh, train_with_oracle

NUM_EPOCHS = 5
CASES = [*all_cases(), communities(5)]


def leading(epoch: int, num_chunks: int) -> tuple[int, ...]:
    """Return one or two chunks, others in each epoch; none in epoch 2."""
    pair = (epoch % num_chunks, (epoch + 1) % num_chunks)
    return () if epoch == 2 else pair[: 1 + (epoch % 2 and num_chunks > 1)]


def expected_order(epoch: int, num_chunks: int) -> list[int]:
    first = leading(epoch, num_chunks)
    drawn = chunk_order(num_chunks, epoch=epoch, seed=SEED, order="shuffled")
    return [*first, *(chunk for chunk in drawn if chunk not in first)]


class Leads(L.Callback):
    """Has chunks go first, and writes what each rank is told of the drift."""

    def __init__(self, num_chunks: int, folder: Path) -> None:
        self.num_chunks, self.folder = num_chunks, folder
        self.drifts: list[Any] = []

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        first = leading(trainer.current_epoch, self.num_chunks)
        trainer.strategy.controls.leading_chunks = first

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        layers = trainer.strategy.collect_staleness()
        self.drifts.append({i: (one.drift, one.drift_of_chunk) for i, one in layers.items()})
        torch.save(self.drifts, self.folder / f"rank_{trainer.global_rank}.pt")


def train(
    case: GraphCase,
    folder: Path,
    *,
    num_stages: int = 1,
    num_shards: int = 1,
    staleness: StalenessName = "constant",
) -> tuple[FitResult, list[Any]]:
    """Return the steps, and for each epoch the drift of each layer, which all ranks agree on."""
    callbacks = [Leads(case.num_chunks, folder), StalenessMonitor()]
    found = run_fit(
        ReferenceModule(),
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=callbacks,
        max_epochs=NUM_EPOCHS,
        tmp_path=folder,
        trainer_kwargs={"limit_val_batches": 0},
        strategy_kwargs={"staleness": staleness},
    )
    ranks = range(num_stages * num_shards)
    first, *others = [torch.load(folder / f"rank_{rank}.pt") for rank in ranks]
    assert all(one == first for one in others)
    return found, first


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_holds_with_leading_chunks(case: GraphCase, tmp_path: Path) -> None:
    assert_equals_oracle(case, train(case, tmp_path)[0])


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_oracle_holds_with_leading_chunks_and_the_default_staleness(
    num_stages: int, tmp_path: Path
) -> None:
    case = communities(5)
    found, _ = train(case, tmp_path, num_stages=num_stages, staleness="predicted")
    rule = METHODS["predicted"].gradients
    assert isinstance(rule, DelayedGradients)
    delay = Delay(rule.decay, rule.momentum, rule.lead)
    assert_equals_oracle(case, found, cross_chunk_grad_scale=rule.scale, delay=delay)


@pytest.mark.parametrize(("num_stages", "num_shards"), [(2, 1), (1, 2)])
def test_ranks_agree_on_leading_chunks_and_on_drift(
    num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    case = communities(5)
    (tmp_path / "one").mkdir()
    _, alone = train(case, tmp_path / "one")
    found, drifts = train(case, tmp_path, num_stages=num_stages, num_shards=num_shards)
    assert_equals_oracle(case, found)
    for epoch, (ours, theirs) in enumerate(zip(drifts, alone, strict=True)):
        if epoch == 0:  # nothing was there to be compared with
            assert all(one == (0.0, {}) for one in ours.values())
            continue
        assert list(ours) == list(theirs) == [0, 1, 2, 3]
        for layer, (drift, of_chunk) in ours.items():
            assert drift == pytest.approx(theirs[layer][0], abs=1e-10)
            assert list(of_chunk) == list(range(5))
            assert of_chunk == pytest.approx(theirs[layer][1], abs=1e-10)


def test_drift_of_the_first_layer_is_that_of_its_weights(tmp_path: Path) -> None:
    """A chunk's rows of the first layer are X_c W; W has moved by the last step."""
    case = communities(5)
    fit, drifts = train(case, tmp_path)
    weights = [step.weights["net.convs.0.lin.weight"] for step in fit.steps]
    for epoch in range(2, NUM_EPOCHS):
        stale, fresh = (case.data.x @ weights[epoch - back].t() for back in (2, 1))
        _, of_chunk = drifts[epoch][0]
        for chunk in range(5):
            rows = case.partition == chunk
            expected = (fresh - stale)[rows].norm() / fresh[rows].norm()
            assert of_chunk[chunk] == pytest.approx(float(expected), abs=1e-10)


def test_an_engine_refuses_chunks_that_there_are_not() -> None:
    """The first step is exact, and has no chunks to order."""
    case = communities(3)
    module = ReferenceModule().net
    engine = one_process_engine(module, partition=case.partition)
    engine.attach()
    engine.controls.leading_chunks = (3,)
    module(case.data.x, case.data.edge_index).sum().backward()
    with pytest.raises(ConfigError, match=r"to name chunks 0 to 2, each once at most \(got 3\)"):
        module(case.data.x, case.data.edge_index)
    engine.detach()


def assert_equals_oracle(case: GraphCase, found: FitResult, **method: Any) -> None:
    expected = train_with_oracle(
        ReferenceModule(),
        case.data,
        case.partition,
        orders=lambda epoch: expected_order(epoch, case.num_chunks),
        refresh=Refresh(),
        num_epochs=NUM_EPOCHS,
        **method,
    )
    assert_steps_equal(found.steps, expected)
