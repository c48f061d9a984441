"""Without edges between chunks, training equals plain PyG on the graph that was cut by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch_geometric.data import Data

from lightning_gnnpipe import StalenessMonitor, StalenessWarmup
from tests.helpers.cases import slow
from tests.helpers.graphs import GraphCase, communities
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
    name: str, case: GraphCase, tmp_path: Path, num_stages: int = 1, **options: Any
) -> FitResult:
    drop = {"cross_chunk_edges": "drop", **options.pop("strategy_kwargs", {})}
    return run_fit(
        ReferenceModule(name),
        case.data,
        num_stages=num_stages,
        num_chunks=case.num_chunks,
        partition=case.partition,
        max_epochs=NUM_STEPS,
        tmp_path=tmp_path,
        strategy_kwargs=drop,
        **options,
    )


def assert_equals_cut_graph(found: FitResult, name: str, case: GraphCase, tmp_path: Path) -> None:
    plain = run_plain(
        ReferenceModule(name), cut_by_hand(case), max_epochs=NUM_STEPS, tmp_path=tmp_path
    )
    assert_steps_equal(found.steps, plain.steps)


@pytest.mark.some_cases(2)
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
    assert_equals_cut_graph(found, name, case, tmp_path)


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_share_of_lost_edges_is_logged_once(
    is_cut: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = communities(3)
    if is_cut:
        case = GraphCase("cut", cut_by_hand(case), case.partition)
    with caplog.at_level(logging.WARNING):
        found = fit_dropped("gcn", case, tmp_path)
    texts = [record.getMessage() for record in caplog.records if WARNING in record.message]
    if is_cut:
        assert not texts
        assert_equals_cut_graph(found, "gcn", case, tmp_path)
        return
    num_edges, (text,) = case.data.num_edges, texts
    lost = num_edges - cut_by_hand(case).num_edges
    assert f"leaves out {lost} of {num_edges} edges ({100 * lost / num_edges:.1f} %)" in text
