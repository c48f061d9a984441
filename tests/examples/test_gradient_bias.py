"""The benchmark of gradients' bias: what it says of methods whose bias is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import lightning as L
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import erdos_renyi_graph

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.models import GCNII, NodeClassifier
from tests.helpers.scripts import modules_of

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks" / "gradient_bias"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The benchmark's module."""
    with modules_of(FOLDER, ("main",)) as found:
        yield found["main"]


def test_groups_are_runs_of_convolutions_and_single_maps(benchmark: ModuleType) -> None:
    names = ("net.lin_in.weight", "net.convs.0.weight1", "net.convs.7.weight1", "net.convs.8.w")
    groups = [benchmark.group_of(name) for name in names]
    assert groups == ["lin_in", "convs 1-8", "convs 1-8", "convs 9-16"]


def test_without_dropout_delayed_gradients_have_no_bias_and_dropped_ones_have(
    benchmark: ModuleType,
) -> None:
    torch.manual_seed(0)
    graph = Data(
        x=torch.randn(60, 5), edge_index=erdos_renyi_graph(60, 0.1), y=torch.arange(60) % 3
    )
    for name in ("train_mask", "val_mask", "test_mask"):
        graph[name] = torch.ones(60, dtype=torch.bool)
    datamodule = FullGraphDataModule(graph)

    def gradients(method: str, num_chunks: int) -> object:
        L.seed_everything(0, verbose=False)
        module = NodeClassifier(GCNII(5, 8, 3, 4, dropout=0.0), 3, 0.0)
        return benchmark.train(
            module,
            datamodule,
            num_epochs=benchmark.NUM_SETTLING + 30,
            staleness=benchmark.METHODS[method],
            num_chunks=num_chunks,
        )

    exact = gradients("constant", 1)
    share_of = {
        name: benchmark.compare(exact, gradients(name, 4), "lin_in")[0]
        for name in ("constant", "delayed", "lead 0.5", "predicted")
    }
    assert share_of["delayed"] == pytest.approx(1, abs=1e-3)
    assert share_of["lead 0.5"] == pytest.approx(1, abs=1e-3)
    assert share_of["constant"] < share_of["predicted"] < 0.99
