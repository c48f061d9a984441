"""The convergence study: which cells there are, what a run is summed up to, and the tables."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_gnnpipe.graph import edge_cut_frac, partition_nodes
from tests.helpers.scripts import ROOT, fixture_of

FOLDER = ROOT / "examples" / "benchmarks" / "convergence"
NAMES = ("synthetic", "cell", "tables", "pictures", "main")
study = fixture_of(FOLDER, *NAMES, scope="module")

Modules = dict[str, ModuleType]


def test_a_table_is_the_product_of_its_lists(study: Modules, tmp_path: Path) -> None:
    table, read = tmp_path / "table.yaml", study["main"].read_table
    table.write_text(
        "- {chunks: [8, 32], method: [exact, default], seed: [0, 1]}\n- {chunks: [8], seed: [0]}\n"
    )
    cells = read(table)
    assert len(cells) == len({cell.name for cell in cells}) == 8
    assert {cell.dataset for cell in cells} == {"Cora"}
    table.write_text("- {method: [best]}\n")
    with pytest.raises(ValueError, match="among exact, default, constant, gnnpipe"):
        read(table)
    cells = read(FOLDER / "study.yaml")  # of the README
    assert {"Cora", "squirrel", "arxiv-like"} <= {cell.dataset for cell in cells}
    assert {cell.recipe for cell in cells} == set(study["cell"].RECIPES)


def test_a_run_is_judged_where_validation_is_best(study: Modules) -> None:
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


def note(study: Modules, folder: Path, test_acc: float = 0.5, **options: object) -> None:
    """Note a finished cell."""
    names = ("best_epoch", "late_test_acc", "test_swing", "val_swing", "late_train_loss", "epoch_s")
    curves = {name: [0.5] * 9 for name in ("seconds", "train_loss", "val_acc", "test_acc")}
    found = {"test_acc": test_acc, **dict.fromkeys(names, 0.5), "cut_frac": 0.87, "curves": curves}
    (folder / "curves").mkdir(exist_ok=True)
    cell = study["cell"].Cell(**options)
    study["main"].note(cell, found, folder / "cells.csv", folder / "curves")


def tables(study: Modules, folder: Path) -> list[str]:
    """Return the lines of the tables that all cells give."""
    rows = list(study["main"].read_rows(folder / "cells.csv"))
    study["tables"].write_tables(rows, folder / "curves", folder / "tables.md")
    study["pictures"].draw(rows, folder / "curves", folder)
    return (folder / "tables.md").read_text().splitlines()


def test_finished_cells_become_tables_and_pictures(study: Modules, tmp_path: Path) -> None:
    for method, seed, acc in (
        ("exact", 0, 0.80),
        ("exact", 1, 0.82),
        ("exact", 2, 0.99),  # not of a seed that the other has
        ("gnnpipe", 0, 0.78),
        ("gnnpipe", 1, 0.80),
        ("constant", 3, 0.70),  # of one that exact has not
    ):
        note(study, tmp_path, acc, method=method, seed=seed)
    lines = tables(study, tmp_path)
    assert lines[0] == "## Cora, 32-layer gcnii, recipe gcnii, 200 epochs"
    assert lines[-3].startswith("|  |  |  | exact |  | 0-2 | 87.0 ±")
    assert lines[-2].startswith("| 87 % | random | 8 | constant |  | 3 | 70.0 ± 0.0 |  | 50.0 |")
    assert lines[-1].startswith(
        "| 87 % | random | 8 | gnnpipe |  | 0-1 | 79.0 ± 1.4 | -2.0 | 50.0 |"
    )
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_cells_without_curves_have_a_line_and_no_picture(study: Modules, tmp_path: Path) -> None:
    for seed in (0, 1):
        note(study, tmp_path, method="exact", seed=seed)
        note(study, tmp_path, method="default", seed=seed)
    place = [cell.strip() for cell in study["tables"].HEADER].index("epochs to target") + 1

    def epochs() -> list[str]:
        return [line.split("|")[place].strip() for line in tables(study, tmp_path)[4:]]

    assert epochs() == ["5", "5"] and len(list(tmp_path.glob("*.png"))) == 2
    exact, default, *_ = study["main"].read_rows(tmp_path / "cells.csv")
    for row in (exact, default):  # one seed of both lines
        (tmp_path / "curves" / f"{row['name']}.csv").unlink()
    for path in tmp_path.glob("*.png"):
        path.unlink()
    assert epochs() == ["", ""]
    assert [path.stem for path in tmp_path.glob("*.png")] == ["Cora_gcnii_32_gcnii_200_0_cut"]


def test_a_line_says_what_is_not_usual(study: Modules, tmp_path: Path) -> None:
    note(study, tmp_path, method="default", adaptive=1, order="fixed")
    note(study, tmp_path, method="default", anneal=100)
    text = "\n".join(tables(study, tmp_path))
    assert "| default | order fixed, adaptive |" in text
    assert "## Cora, 32-layer gcnii, recipe gcnii, 200 epochs, the last 100 annealed\n" in text
    (tmp_path / "cells.csv").write_text("name,dataset,test_acc\na,Cora,0.5\n")
    with pytest.raises(ValueError, match="Expected the columns"):  # of an earlier version
        tables(study, tmp_path)


@pytest.mark.parametrize(("target", "found"), [(0.3, "5"), (0.7, "8"), (0.9, "never")])
def test_epochs_to_a_target_are_those_of_the_median_run(
    study: Modules, target: float, found: str, tmp_path: Path
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
    study: Modules,
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
