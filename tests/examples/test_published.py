"""The benchmark of published settings: what is trained, where a run is judged, its table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.scripts import modules_of

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks" / "published"
NAMES = ("resumable", "settings", "run_setting", "accuracies", "main")


@pytest.fixture(scope="module")
def program() -> Iterator[dict[str, ModuleType]]:
    with modules_of(FOLDER, NAMES) as found:
        yield found


@pytest.fixture
def dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_the_settings_are_read_and_have_names_of_their_own(program: dict[str, ModuleType]) -> None:
    settings = program["settings"].read_settings()
    assert len({setting.name for setting in settings}) == len(settings) == 10
    assert [s.name for s in program["settings"].read_settings("cora-*")] == [
        "cora-gcnii",
        "cora-gcn",
    ]
    with pytest.raises(ValueError, match="minesweeper-gcn"):
        program["settings"].read_settings("none")


@pytest.mark.parametrize("name", ["cora-gcnii", "minesweeper-gcn", "physics-gcn", "cora-gcn"])
def test_decays_reach_the_parameters_that_they_are_for(
    program: dict[str, ModuleType], name: str
) -> None:
    [setting] = program["settings"].read_settings(name)
    module = program["settings"].Published(replace(setting, layers=3), 8, 2)
    groups = module.configure_optimizers().param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decays) == len(list(module.parameters()))
    convs = [decays[id(p)] for p in module.net.convs[1].parameters()]
    first = decays[id(next(module.net.convs[0].parameters()))]
    expected = {"cora-gcnii": (0.01, 0.01), "physics-gcn": (5e-4, 5e-4), "cora-gcn": (5e-4, 0.0)}
    assert (first, convs[0]) == expected.get(name, (0.0, 0.0))


def test_a_run_is_judged_where_validation_is_best(program: dict[str, ModuleType]) -> None:
    curves = program["run_setting"].Curves()
    losses, metrics, tests = [3.0, 1.0, 2.0, 1.0], [0.1, 0.2, 0.9, 0.2], [0.5, 0.6, 0.7, 0.8]
    for loss, metric, test in zip(losses, metrics, tests, strict=True):
        curves.epochs.append({"val_loss": loss, "val_metric": metric, "test_metric": test})
    by_loss = program["run_setting"].summarize(curves, "loss")
    by_metric = program["run_setting"].summarize(curves, "metric")
    assert (by_loss["test"], by_loss["best_epoch"]) == (60.0, 2)
    assert (by_metric["test"], by_metric["last_test"]) == (70.0, 80.0)


@pytest.mark.parametrize("name", ["cora-gcnii", "minesweeper-gcn"])
def test_exact_training_equals_a_plain_trainer(
    program: dict[str, ModuleType], name: str, dtype: None
) -> None:
    [setting] = program["settings"].read_settings(name)
    small = replace(setting, graph="digits", split="drawn", metric="accuracy", layers=2, hidden=8)
    assert program["run_setting"].compare(small, 0, None) < 1e-12


def test_the_table_says_what_is_out_of_bounds(program: dict[str, ModuleType]) -> None:
    [setting] = program["settings"].read_settings("cora-gcn")

    def row(method: str, seed: int, test: float) -> dict[str, str]:
        found = {"method": method, "seed": str(seed), "test": str(test)}
        return {**found, "epochs": "200", "cpu_s": "9", "difference": "1.0e-16"}

    rows = [row("exact", 0, 81.6), row("exact", 1, 82.0), row("compare", 0, 0.0)]
    near = program["accuracies"].describe(setting, [*rows, row("pipeline", 0, 81.2)])
    far = program["accuracies"].describe(setting, [*rows, row("pipeline", 0, 81.0)])
    assert near[4:8] == ["81.8 ± 0.3", "81.2", "+0.3", "-0.4"]
    assert far[7] == "-0.6, beyond the bound"
    better = [row("exact", 0, 82.3)]
    assert program["accuracies"].describe(setting, better)[6] == "+0.8, beyond the bound"
