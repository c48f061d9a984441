"""The accuracy example: its runs differ in the schedule only, and its table says by how much."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch
from accuracy import DeepClassifier, Results, Setting, build_table, train_once
from rich.console import Console
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.models import GCNII

SMALL = dict(num_epochs=15, num_exact_epochs=2, num_layers=2, hidden_channels=8)


@pytest.fixture
def datamodule() -> FullGraphDataModule:
    """Two cliques of twenty nodes, one class each, with the class among the features."""
    clique = torch.combinations(torch.arange(20)).t()
    edges = torch.cat([clique, clique + 20], dim=1)
    y = torch.arange(2).repeat_interleave(20)
    x = torch.nn.functional.one_hot(y, 4).float()
    return FullGraphDataModule(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=y))


@pytest.mark.parametrize("model", ["gcnii", "resgcnplus-batch"])
@pytest.mark.parametrize("num_chunks", [None, 4])
def test_a_run_learns_and_repeats_itself(datamodule, num_chunks, model):
    setting = Setting(**SMALL, num_chunks=num_chunks, model=model)
    first = train_once(datamodule, setting, seed=1)
    assert first > 0.9
    assert train_once(datamodule, setting, seed=1) == first


def test_every_parameter_is_optimized_once_and_convolutions_decay_more():
    module = DeepClassifier(GCNII(4, 8, 2, 3), 2, lr=0.01, weight_decay=0.1, conv_decay=0.2)
    convs, others = module.configure_optimizers().param_groups
    assert (convs["weight_decay"], others["weight_decay"]) == (0.2, 0.1)
    assert len(convs["params"]) == 3
    optimized = {id(parameter) for group in (convs, others) for parameter in group["params"]}
    assert optimized == {id(parameter) for parameter in module.parameters()}


def test_table_shows_mean_spread_and_difference():
    options = argparse.Namespace(datasets=["Cora"], seeds=[0, 1], epochs=5, model="gcnii", layers=2)
    table = build_table({("Cora", "exact"): [0.8, 0.9], ("Cora", "pipeline"): [0.9, 0.9]}, options)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    assert "│ Cora │ exact    │ 85.0 ± 7.1 │          │" in captured.get()
    assert "│      │ pipeline │ 90.0 ± 0.0 │     +5.0 │" in captured.get()


def test_runs_are_made_once(tmp_path):
    path, setting = tmp_path / "accuracy.csv", Setting("gcnii", 3)
    Results(path).add("Cora", "exact", 1, setting, 0.75)

    again = Results(path)
    assert again.find("Cora", 1, setting) == 0.75
    assert again.find("Cora", 2, setting) is None
    assert again.find("Cora", 1, replace(setting, num_chunks=8)) is None


def test_a_file_with_other_columns_is_not_added_to(tmp_path):
    path = tmp_path / "accuracy.csv"
    path.write_text("dataset,seed,run,num_stages,test_acc\nCora,0,exact,2,0.8\n")
    before = path.read_text()
    with pytest.raises(SystemExit, match="other columns"):
        Results(path)
    assert path.read_text() == before
