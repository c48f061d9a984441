"""Without edges between chunks, training equals plain PyG on the graph that was cut by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessMonitor, StalenessWarmup
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import FitResult, run_fit, run_plain
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import assert_steps_equal

NUM_STEPS = 4
WARNING = "cross_chunk_edges='drop'"


def cut_by_hand(case: GraphCase) -> Data:
    """Return the graph without the edges between chunks, and without their features."""
    data = case.data.clone()
    source, target = case.partition[data.edge_index]
    data.edge_index = data.edge_index[:, source == target]
    data.edge_attr = data.edge_attr[source == target]
    return data


def fit_dropped(
    name: str, case: GraphCase, tmp_path: Path, num_stages: int = 1, **options: Any
) -> FitResult:
    return run_fit(
        ReferenceModule(name),
        case.data,
        num_stages=num_stages,
        num_chunks=case.num_chunks,
        partition=case.partition,
        tmp_path=tmp_path,
        **{
            "max_epochs": NUM_STEPS,
            **options,
            "strategy_kwargs": {
                "cross_chunk_edges": "drop",
                **options.get("strategy_kwargs", {}),
            },
        },
    )


def fit_by_hand(name: str, case: GraphCase, tmp_path: Path) -> FitResult:
    return run_plain(
        ReferenceModule(name), cut_by_hand(case), max_epochs=NUM_STEPS, tmp_path=tmp_path
    )


@pytest.mark.parametrize("name", ["gcn", "edge"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_one_stage_equals_the_cut_graph(case: GraphCase, name: str, tmp_path: Path) -> None:
    found = fit_dropped(name, case, tmp_path)
    assert_steps_equal(found.steps, fit_by_hand(name, case, tmp_path).steps)


@pytest.mark.parametrize(
    ("name", "num_stages", "options"),
    [
        ("sage", 2, {}),
        ("gat_jk", 2, {}),
        ("edge", 2, {"strategy_kwargs": {"recompute": True}}),
        ("gcnii", 2, {"callbacks": [StalenessWarmup(num_epochs=2), StalenessMonitor()]}),
        ("gcn", 1, {"num_shards": 2}),
        ("edge", 1, {"num_shards": 2}),
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
    fit = run_fit(
        module,
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=case.num_chunks,
        partition=case.partition,
        max_epochs=2,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 1.0},
        strategy_kwargs={"cross_chunk_edges": "drop"},
    )
    plain.load_state_dict(fit.state_dict)
    plain.eval()
    with torch.no_grad():
        expected = plain.net(*plain.net_inputs(case.data))
        expected_loss = plain.loss(expected, case.data)
    [found] = fit.trainer.predict(module, datamodule=FullGraphDataModule(case.data))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    if num_stages * num_shards == 1:
        val_loss = fit.trainer.callback_metrics["val_loss"]
        assert val_loss != pytest.approx(float("nan"))
        assert expected_loss.isfinite()


def test_the_share_of_lost_edges_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = communities(3)
    lost = case.data.num_edges - cut_by_hand(case).num_edges
    with caplog.at_level(logging.WARNING):
        fit_dropped("gcn", case, tmp_path)
    [text] = [record.getMessage() for record in caplog.records if WARNING in record.message]
    assert f"without {lost} of its {case.data.num_edges} edges" in text
    assert f"({100 * lost / case.data.num_edges:.1f} %)" in text


def test_no_edge_is_lost_between_components_or_in_one_chunk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = communities(3)
    components = torch.cat([case.partition, 3 + case.partition])
    twice = case.data.clone()
    twice.x = torch.cat([case.data.x, case.data.x])
    with caplog.at_level(logging.WARNING):
        one = GraphCase("one", case.data, torch.zeros_like(case.partition))
        found = fit_dropped("gcn", one, tmp_path)
        assert_steps_equal(found.steps, fit_by_hand("gcn", one, tmp_path).steps)
    assert components.numel() == twice.x.size(0)
    assert WARNING not in caplog.text
