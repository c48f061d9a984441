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
