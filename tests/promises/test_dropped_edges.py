"""Without edges between chunks, training equals plain PyG on the graph that was cut by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

from lightning_gnnpipe import (
    FullGraphDataModule,
    GNNPipeStrategy,
    StalenessMonitor,
    StalenessWarmup,
)
from lightning_gnnpipe.types import StalenessName
from tests.helpers.cases import covering, name_of, slow
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import FitResult, run_fit, run_plain
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import assert_steps_equal

NUM_STEPS = 5  # weights would be carried forward from the fourth on
WARNING = "cross_chunk_edges='drop'"


def cut_by_hand(case: GraphCase) -> Data:
    """Return the graph without the edges between chunks, and without their features."""
    data = case.data.clone()
    source, target = case.partition[data.edge_index]
    data.edge_index = data.edge_index[:, source == target]
    data.edge_attr = data.edge_attr[source == target]
    return data


def fit_dropped(
    name: str,
    case: GraphCase,
    tmp_path: Path,
    num_stages: int = 1,
    module: ReferenceModule | None = None,
    strategy_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> FitResult:
    return run_fit(
        module or ReferenceModule(name),
        case.data,
        num_stages=num_stages,
        num_chunks=case.num_chunks,
        partition=case.partition,
        max_epochs=NUM_STEPS,
        tmp_path=tmp_path,
        strategy_kwargs={"cross_chunk_edges": "drop", **(strategy_kwargs or {})},
        **options,
    )


def fit_by_hand(name: str, case: GraphCase, tmp_path: Path) -> FitResult:
    return run_plain(
        ReferenceModule(name), cut_by_hand(case), max_epochs=NUM_STEPS, tmp_path=tmp_path
    )


@pytest.mark.parametrize(("case", "name"), covering(all_cases(), ["gcn", "edge"]), ids=name_of)
def test_one_stage_equals_the_cut_graph(case: GraphCase, name: str, tmp_path: Path) -> None:
    found = fit_dropped(name, case, tmp_path)
    assert_steps_equal(found.steps, fit_by_hand(name, case, tmp_path).steps)


@pytest.mark.parametrize(
    ("name", "num_stages", "options"),
    [
        slow("sage", 2, {}),
        ("gat_jk", 2, {}),
        ("edge", 2, {"strategy_kwargs": {"recompute": True}}),
        ("gcnii", 2, {"callbacks": [StalenessWarmup(num_epochs=2), StalenessMonitor()]}),
        slow("gcn", 1, {"num_shards": 2}),
        slow("edge", 1, {"num_shards": 2}),
        ("gat_jk", 2, {"num_shards": 2}),
        ("gcn", 1, {"num_shards": 2, "strategy_kwargs": {"recompute": True}}),
    ],
)
def test_stages_and_shards_equal_the_cut_graph(
    name: str, num_stages: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Warm-up epochs have the cut graph as well; edges between shards of a chunk stay."""
    case = communities(3)
    found = fit_dropped(name, case, tmp_path, num_stages, **options)
    assert_steps_equal(found.steps, fit_by_hand(name, case, tmp_path).steps)


@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 1), (2, 1), (1, 2)])
def test_evaluation_reads_all_edges(num_stages: int, num_shards: int, tmp_path: Path) -> None:
    """Validation between the epochs, and prediction behind them."""
    case, module, plain = communities(5), ReferenceModule("gcn"), ReferenceModule("gcn")
    options = {"num_shards": num_shards, "trainer_kwargs": {"limit_val_batches": 1.0}}
    fit = fit_dropped("gcn", case, tmp_path, num_stages, module=module, **options)
    for step in fit.steps:
        plain.load_state_dict({**plain.state_dict(), **step.weights})
        with torch.no_grad():
            outputs = plain.eval()(case.data)
        expected = F.cross_entropy(outputs[case.data.val_mask], case.data.y[case.data.val_mask])
        torch.testing.assert_close(step.metrics["val_loss"], expected, rtol=1e-10, atol=1e-10)
    if num_stages * num_shards == 1:  # Lightning returns no predictions from other processes
        datamodule = FullGraphDataModule(case.data)
        (predicted,) = fit.trainer.predict(module, datamodule=datamodule)
        torch.testing.assert_close(predicted, outputs, rtol=1e-10, atol=1e-10)


def test_the_share_of_lost_edges_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = communities(3)
    lost = case.data.num_edges - cut_by_hand(case).num_edges
    with caplog.at_level(logging.WARNING):
        fit_dropped("gcn", case, tmp_path)
    [text] = [record.getMessage() for record in caplog.records if WARNING in record.message]
    assert f"leaves out {lost} of {case.data.num_edges} edges" in text
    assert f"({100 * lost / case.data.num_edges:.1f} %)" in text


def test_nothing_is_told_where_no_edge_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = communities(3)
    whole = GraphCase("cut", cut_by_hand(case), case.partition)
    with caplog.at_level(logging.WARNING):
        found = fit_dropped("gcn", whole, tmp_path)
    assert WARNING not in caplog.text
    assert_steps_equal(found.steps, fit_by_hand("gcn", whole, tmp_path).steps)


def test_a_run_without_histories_is_resumed_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps after it equal those of a run that never stopped; no epoch is exact."""
    case, module, kinds = communities(3), ReferenceModule("gcn"), _NotesKind()
    first = fit_dropped("gcn", case, tmp_path, callbacks=[kinds])
    assert kinds.was_exact == [False] * NUM_STEPS

    def trainer(num_epochs: int) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            strategy=GNNPipeStrategy(partition=case.partition, cross_chunk_edges="drop"),
            max_epochs=num_epochs,
            callbacks=[kinds],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    path = tmp_path / "half.ckpt"
    half = trainer(NUM_STEPS // 2)
    half.fit(module, FullGraphDataModule(case.data))
    half.save_checkpoint(path)
    assert [one.name for one in tmp_path.glob("half*")] == [path.name]  # no histories beside it
    resumed = ReferenceModule("gcn", seed=2)
    with caplog.at_level(logging.WARNING):
        trainer(NUM_STEPS).fit(resumed, FullGraphDataModule(case.data), ckpt_path=path)
    assert "has no histories" not in caplog.text
    assert not any(kinds.was_exact)
    for name, value in first.state_dict.items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-10, atol=1e-10)


class _NotesKind(L.Callback):
    """Whether each step was exact."""

    def __init__(self) -> None:
        self.was_exact: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.was_exact.append(trainer.strategy.collect_stats().is_exact)


@pytest.mark.parametrize("staleness", ["constant", "gnnpipe"])
def test_where_only_norms_are_stale_methods_are_alike(
    staleness: StalenessName, tmp_path: Path
) -> None:
    """No row is read stale."""
    default, other = (
        fit_dropped(
            "batch_norm", communities(5), tmp_path, strategy_kwargs={"staleness": name}
        ).steps
        for name in ("drift", staleness)
    )
    assert_steps_equal(default, other)
