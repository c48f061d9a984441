"""The convergence study: which cells there are, what a run is summed up to, and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_gnnpipe.graph import edge_cut_frac, partition_nodes
from tests.helpers.scripts import modules_of

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks" / "convergence"
NAMES = ("synthetic", "cell", "tables", "pictures", "main")


@pytest.fixture(scope="module")
def study() -> Iterator[dict[str, ModuleType]]:
    """The study's modules."""
    with modules_of(FOLDER, NAMES) as found:
        yield found


def test_a_table_is_the_product_of_its_lists(study: dict[str, ModuleType], tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(
        "- {chunks: [8, 32], method: [exact, default], seed: [0, 1]}\n- {chunks: [8], seed: [0]}\n"
    )
    cells = study["main"].read_table(table)
    assert len(cells) == len({cell.name for cell in cells}) == 8
    assert {cell.dataset for cell in cells} == {"Cora"}
    table.write_text("- {method: [best]}\n")
    with pytest.raises(ValueError, match="among exact, default, constant, gnnpipe"):
        study["main"].read_table(table)


def test_the_study_of_the_readme_can_be_read(study: dict[str, ModuleType]) -> None:
    cells = study["main"].read_table(FOLDER / "study.yaml")
    assert {"Cora", "squirrel", "arxiv-like"} <= {cell.dataset for cell in cells}
    assert {cell.recipe for cell in cells} == set(study["cell"].RECIPES)


def test_a_run_is_judged_where_validation_is_best(study: dict[str, ModuleType]) -> None:
    curves = {
        "val_acc": [0.1, 0.9, 0.5, *[0.8] * 20],
        "test_acc": [0.2, 0.7, 0.9, *[0.6] * 19, 0.5],
        "train_loss": [2.0] * 23,
        "seconds": [1.0, 3.0, 2.0, *[2.0] * 20],
    }
    found = study["cell"].summarize(curves)
    assert (found["test_acc"], found["best_epoch"]) == (0.7, 1)
    assert found["test_swing"] == pytest.approx(0.2)
    assert found["val_swing"] == pytest.approx(0.1)
    assert (found["epoch_s"], found["late_train_loss"]) == (2.0, 2.0)


def test_finished_cells_become_tables_and_pictures(
    study: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "curves").mkdir()
    figures = {"best_epoch": 2, "late_test_acc": 0.8, "test_swing": 0.01, "val_swing": 0.0}
    figures |= {"late_train_loss": 0.1, "epoch_s": 0.25, "cut_frac": 0.87}
    for method, seed, acc in (
        ("exact", 0, 0.80),
        ("exact", 1, 0.82),
        ("exact", 2, 0.99),  # not of a seed that the other has
        ("gnnpipe", 0, 0.78),
        ("gnnpipe", 1, 0.80),
        ("constant", 3, 0.70),  # of one that exact has not
    ):
        curves = {name: [0.5, 0.6] for name in ("seconds", "train_loss", "val_acc", "test_acc")}
        cell = study["cell"].Cell(method=method, seed=seed)
        study["main"].note(
            cell,
            {"test_acc": acc, **figures, "curves": curves},
            tmp_path / "cells.csv",
            tmp_path / "curves",
        )
    rows = list(study["main"].read_rows(tmp_path / "cells.csv"))
    study["tables"].write_tables(rows, tmp_path / "curves", tmp_path / "tables.md")
    lines = (tmp_path / "tables.md").read_text().splitlines()
    assert lines[0] == "## Cora, 32-layer gcnii, recipe gcnii, 200 epochs"
    assert lines[-3].startswith("|  |  |  | exact |  | 0-2 | 87.0 ±")
    assert lines[-2].startswith("| 87 % | random | 8 | constant |  | 3 | 70.0 ± 0.0 |  | 80.0 |")
    assert lines[-1].startswith(
        "| 87 % | random | 8 | gnnpipe |  | 0-1 | 79.0 ± 1.4 | -2.0 | 80.0 |"
    )
    study["pictures"].draw(rows, tmp_path / "curves", tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 2


def note_one(study: dict[str, ModuleType], folder: Path, **options: object) -> None:
    """Note a finished cell, which has found little."""
    names = ("best_epoch", "late_test_acc", "test_swing", "val_swing", "late_train_loss", "epoch_s")
    curves = {name: [0.5] * 9 for name in ("seconds", "train_loss", "val_acc", "test_acc")}
    found = {"test_acc": 0.5, **dict.fromkeys(names, 0.5), "cut_frac": 0.5, "curves": curves}
    (folder / "curves").mkdir(exist_ok=True)
    cell = study["cell"].Cell(**options)
    study["main"].note(cell, found, folder / "cells.csv", folder / "curves")


def test_cells_without_curves_have_a_line_and_no_picture(
    study: dict[str, ModuleType], tmp_path: Path
) -> None:
    for seed in (0, 1):
        note_one(study, tmp_path, method="exact", seed=seed)
        note_one(study, tmp_path, method="default", seed=seed)
    rows = list(study["main"].read_rows(tmp_path / "cells.csv"))

    def lines() -> list[list[str]]:
        study["tables"].write_tables(rows, tmp_path / "curves", tmp_path / "tables.md")
        found = (tmp_path / "tables.md").read_text().splitlines()[4:]
        return [[cell.strip() for cell in line.split("|")] for line in found]

    place = [cell.strip() for cell in study["tables"].HEADER].index("epochs to target") + 1
    assert [line[place] for line in lines()] == ["5", "5"]
    for row in rows[::2]:  # one seed of both lines
        (tmp_path / "curves" / f"{row['name']}.csv").unlink()
    for row in rows[:1]:
        assert not study["tables"].has_curves([row], tmp_path / "curves")
    (tmp_path / "curves" / f"{rows[1]['name']}.csv").unlink()
    assert [line[place] for line in lines()] == ["", ""]
    study["pictures"].draw(rows, tmp_path / "curves", tmp_path)
    assert [path.stem for path in tmp_path.glob("*.png")] == ["Cora_gcnii_32_gcnii_200_0_cut"]


def test_a_line_says_what_is_not_usual(study: dict[str, ModuleType], tmp_path: Path) -> None:
    note_one(study, tmp_path, method="default", adaptive=1, order="fixed")
    note_one(study, tmp_path, method="default", anneal=100)
    rows = list(study["main"].read_rows(tmp_path / "cells.csv"))
    study["tables"].write_tables(rows, tmp_path / "curves", tmp_path / "tables.md")
    text = (tmp_path / "tables.md").read_text()
    assert "| default | order fixed, adaptive |" in text
    assert "## Cora, 32-layer gcnii, recipe gcnii, 200 epochs, the last 100 annealed\n" in text


def test_cells_of_an_earlier_version_are_refused(
    study: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "cells.csv").write_text("name,dataset,test_acc\na,Cora,0.5\n")
    with pytest.raises(ValueError, match="Expected the columns"):
        list(study["main"].read_rows(tmp_path / "cells.csv"))


@pytest.mark.parametrize(("target", "found"), [(0.3, "5"), (0.7, "8"), (0.9, "never")])
def test_epochs_to_a_target_are_those_of_the_median_run(
    study: dict[str, ModuleType], target: float, found: str, tmp_path: Path
) -> None:
    """A mean of five epochs has to reach it: one good epoch is luck."""
    for name, late in (("a", 0.8), ("b", 0.8), ("c", 0.4)):
        values = [0.3, 0.3, 0.3, 1.0, 0.3, *[late] * 10]
        (tmp_path / f"{name}.csv").write_text("\n".join(["test_acc", *map(str, values)]))
    rows = [{"name": name} for name in "abc"]
    assert study["tables"].epochs_to(target, rows, tmp_path) == found


@pytest.mark.parametrize(
    ("name", "shape", "degree", "num_classes", "min_cut"),
    [("arxiv-like", (16_934, 128), 13, 40, 0.4), ("arxiv-dense", (4_000, 128), 36, 10, 0.7)],
)
def test_made_graphs_have_their_ratios(
    study: dict[str, ModuleType],
    name: str,
    shape: tuple[int, int],
    degree: float,
    num_classes: int,
    min_cut: float,
) -> None:
    data = study["cell"].MADE[name]()
    source, target = data.edge_index
    degrees = torch.bincount(source, minlength=data.num_nodes)
    assert data.x.shape == shape and data.y.unique().numel() == num_classes
    assert degrees.double().mean() == pytest.approx(degree, rel=0.1)
    assert degrees.max() > 25 * degrees.median()
    assert (data.y[source] == data.y[target]).double().mean() > 0.4
    parts = partition_nodes(data.edge_index, data.num_nodes, num_chunks=32, method="metis", seed=0)
    assert edge_cut_frac(data.edge_index, parts) > min_cut
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(0).eq(1).all()
