"""The benchmark of gradients' bias: what it says of methods whose bias is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import erdos_renyi_graph

from lightning_gnnpipe import FullGraphDataModule
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


def test_a_share_is_the_projection_of_a_mean(benchmark: ModuleType) -> None:
    exact, other = benchmark.MeanGradient(), benchmark.MeanGradient()
    exact.sums, exact.num_steps = {"a": torch.tensor([6.0, 0.0])}, 2  # mean 3, 0
    other.sums, other.num_steps = {"a": torch.tensor([9.0, 60.0])}, 6  # mean 1.5, and across it
    assert other.share_of(exact, "a") == pytest.approx(0.5)


def test_a_factor_makes_up_for_a_part_of_what_is_dropped(
    benchmark: ModuleType,
) -> None:
    torch.manual_seed(0)
    edges = erdos_renyi_graph(60, 0.1)
    graph = Data(x=torch.randn(60, 5), edge_index=edges, y=torch.arange(60) % 3)
    for name in ("train_mask", "val_mask", "test_mask"):
        graph[name] = torch.ones(60, dtype=torch.bool)
    shares = benchmark.measure(
        FullGraphDataModule(graph), num_layers=4, num_chunks=4, num_epochs=3, num_steps=30, seed=0
    )
    assert list(shares) == ["lin_in", "convs 1-8", "lin_out"]
    for group in ("lin_in", "convs 1-8"):
        constant, doubled = shares[group]
        assert constant < doubled < 0.99
    assert shares["lin_out"] == pytest.approx([1, 1], abs=1e-3)
