"""The benchmarks' programs: which runs there are, what is judged, and what is reported of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.scripts import ROOT, fixture_of

FOLDER = ROOT / "examples" / "benchmarks"

Modules = dict[str, ModuleType]

published = fixture_of(
    FOLDER / "published", "resumable", "settings", "run_setting", "accuracies", "main"
)
study = fixture_of(FOLDER / "convergence", "cell", "main")


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


def test_a_table_of_the_convergence_study_is_the_product_of_its_lists(
    study: Modules, tmp_path: Path
) -> None:
    table, read = tmp_path / "table.yaml", study["main"].read_table
    table.write_text(
        "- {chunks: [8, 32], method: [exact, default], seed: [0, 1]}\n- {chunks: [8], seed: [0]}\n"
    )
    assert len({cell.name for cell in read(table)}) == len(read(table)) == 8
    table.write_text("- {method: [best]}\n")
    with pytest.raises(ValueError, match="among exact, default, constant, gnnpipe"):
        read(table)
    cells = read(FOLDER / "convergence" / "study.yaml")  # of the README
    assert {cell.recipe for cell in cells} == set(study["cell"].RECIPES)
