"""The benchmarks' programs: which runs there are, what is judged, and what is reported of them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import erdos_renyi_graph

from lightning_gnnpipe import FullGraphDataModule
from tests.helpers.scripts import ROOT, fixture_of

FOLDER = ROOT / "examples" / "benchmarks"

Modules = dict[str, ModuleType]

published = fixture_of(
    FOLDER / "published", "resumable", "settings", "run_setting", "accuracies", "main"
)
dropped = fixture_of(FOLDER / "dropped_edges", "cells", "report", "main")
bias, multi_host = (fixture_of(FOLDER / name, "main") for name in ("gradient_bias", "multi_host"))


def test_the_settings_are_read_and_have_names_of_their_own(published: Modules) -> None:
    read = published["settings"].read_settings
    assert len({setting.name for setting in read()}) == len(read()) == 10
    assert [setting.name for setting in read("cora-*")] == ["cora-gcnii", "cora-gcn"]
    with pytest.raises(ValueError, match="minesweeper-gcn"):
        read("none")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cora-gcnii", (0.01, 0.01)),
        ("minesweeper-gcn", (0.0, 0.0)),
        ("physics-gcn", (5e-4, 5e-4)),
        ("cora-gcn", (5e-4, 0.0)),
    ],
)
def test_decays_reach_the_parameters_that_they_are_for(
    published: Modules, name: str, expected: tuple[float, float]
) -> None:
    [setting] = published["settings"].read_settings(name)
    module = published["settings"].Published(replace(setting, layers=3), 8, 2)
    groups = module.configure_optimizers().param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decays) == len(list(module.parameters()))
    first, second = (next(module.net.convs[i].parameters()) for i in (0, 1))
    assert (decays[id(first)], decays[id(second)]) == expected


def test_a_run_is_judged_where_validation_is_best(published: Modules) -> None:
    curves = published["run_setting"].Curves()
    losses, metrics, tests = [3.0, 1.0, 2.0, 1.0], [0.1, 0.2, 0.9, 0.2], [0.5, 0.6, 0.7, 0.8]
    for loss, metric, test in zip(losses, metrics, tests, strict=True):
        curves.epochs.append({"val_loss": loss, "val_metric": metric, "test_metric": test})
    by_loss, by_metric = (
        published["run_setting"].summarize(curves, by) for by in ("loss", "metric")
    )
    assert (by_loss["test"], by_loss["best_epoch"]) == (60.0, 2)
    assert (by_metric["test"], by_metric["last_test"]) == (70.0, 80.0)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["cora-gcnii", "minesweeper-gcn"])
def test_exact_training_equals_a_plain_trainer(published: Modules, name: str) -> None:
    [setting] = published["settings"].read_settings(name)
    small = replace(setting, graph="digits", split="drawn", metric="accuracy", layers=2, hidden=8)
    before = torch.get_default_dtype()
    try:
        assert published["run_setting"].compare(small, 0, None) < 1e-12
    finally:
        torch.set_default_dtype(before)


def options(**given: object) -> Namespace:
    usual = {"datasets": ["Cora"], "partitions": ["contiguous", "metis"], "chunks": [1, 2, 4]}
    usual |= {"methods": ["dropped", "constant"], "warmup": 10, "epochs": 5, "seeds": [0, 1]}
    return Namespace(**{**usual, **given})


def test_one_chunk_is_run_once_a_seed(dropped: Modules) -> None:
    cells = list(dropped["main"].cells_of(options()))
    assert len(cells) == len(set(cells)) == 2 * (1 + 2 * 2 * 2)
    assert sum(cell.chunks == 1 for cell in cells) == 2
    warmups = {(cell.method, cell.warmup) for cell in cells if cell.chunks > 1}
    assert warmups == {("dropped", 1), ("constant", 10)}


def test_the_committed_table_is_that_of_the_committed_runs(
    dropped: Modules, tmp_path: Path
) -> None:
    folder = FOLDER / "dropped_edges"
    rows = dropped["report"].summarize(dropped["cells"].read_cells(folder / "cells.csv"))
    dropped["report"].write_rows(tmp_path / "accuracy.csv", rows)
    assert (tmp_path / "accuracy.csv").read_text() == (folder / "accuracy.csv").read_text()


def test_a_share_is_the_projection_of_a_mean_for_a_group_of_layers(bias: ModuleType) -> None:
    names = ("net.lin_in.weight", "net.convs.0.weight1", "net.convs.7.weight1", "net.convs.8.w")
    groups = [bias.group_of(name) for name in names]
    assert groups == ["lin_in", "convs 1-8", "convs 1-8", "convs 9-16"]
    exact, other = bias.MeanGradient(), bias.MeanGradient()
    exact.sums, exact.num_steps = {"a": torch.tensor([6.0, 0.0])}, 2  # mean 3, 0
    other.sums, other.num_steps = {"a": torch.tensor([9.0, 60.0])}, 6  # mean 1.5, and across it
    assert other.share_of(exact, "a") == pytest.approx(0.5)


@pytest.mark.slow
def test_a_factor_makes_up_for_a_part_of_what_is_dropped(bias: ModuleType) -> None:
    torch.manual_seed(0)
    edges = erdos_renyi_graph(60, 0.1)
    graph = Data(x=torch.randn(60, 5), edge_index=edges, y=torch.arange(60) % 3)
    for name in ("train_mask", "val_mask", "test_mask"):
        graph[name] = torch.ones(60, dtype=torch.bool)
    sizes = {"num_layers": 4, "num_chunks": 4, "num_epochs": 3, "num_steps": 30}
    shares = bias.measure(FullGraphDataModule(graph), **sizes, seed=0)
    assert list(shares) == ["lin_in", "convs 1-8", "lin_out"]
    for group in ("lin_in", "convs 1-8"):
        constant, doubled = shares[group]
        assert constant < doubled < 0.99
    assert shares["lin_out"] == pytest.approx([1, 1], abs=1e-3)


def parse(program: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> Namespace:
    modes = ["alone", "graph fp32", "pipe fp32"]
    monkeypatch.setattr("sys.argv", ["main.py", "--modes", *modes, *words])
    found: Namespace = program.parse_options()
    return found


@pytest.mark.parametrize("other", [["--matmul", "medium"], ["--chunks", "8"], ["--default-malloc"]])
def test_figures_of_other_settings_are_not_mixed(
    multi_host: ModuleType, monkeypatch: pytest.MonkeyPatch, other: list[str]
) -> None:
    program, known = multi_host, {}
    for _ in range(2):
        program.check_settings(parse(program, monkeypatch), known)
    with pytest.raises(SystemExit, match="other settings"):
        program.check_settings(parse(program, monkeypatch, *other), known)
