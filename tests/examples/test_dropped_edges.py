"""The benchmark of dropped edges: which runs there are, and what is reported of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.scripts import modules_of

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks" / "dropped_edges"
NAMES = ("cells", "report", "main")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules."""
    with modules_of(FOLDER, NAMES) as found:
        yield found


def options(**given: object) -> Namespace:
    return Namespace(
        **{
            "datasets": ["Cora"],
            "partitions": ["contiguous", "metis"],
            "chunks": [1, 2, 4],
            "methods": ["dropped", "constant"],
            "warmup": 10,
            "epochs": 5,
            "seeds": [0, 1],
            **given,
        }
    )


def test_one_chunk_is_run_once_a_seed(benchmark: dict[str, ModuleType]) -> None:
    cells = list(benchmark["main"].cells_of(options()))
    assert len(cells) == len(set(cells)) == 2 * (1 + 2 * 2 * 2)
    assert sum(cell.chunks == 1 for cell in cells) == 2
    assert {cell.warmup for cell in cells if cell.method == "dropped"} == {1}
    assert {cell.warmup for cell in cells if cell.method == "constant"} == {10}


def test_changes_are_those_to_one_chunk_of_the_same_seed(
    benchmark: dict[str, ModuleType], tmp_path: Path
) -> None:
    cells = benchmark["main"].cells_of(options(partitions=["metis"], chunks=[1, 2]))
    for number, cell in enumerate(cells):
        measured = {"test": 80.0 - number, "late": 70.0, "cut": 5.0, "seconds": 1.0}
        benchmark["cells"].write_cell(tmp_path / "cells.csv", cell, measured)
    rows = benchmark["report"].summarize(benchmark["cells"].read_cells(tmp_path / "cells.csv"))
    found = {row["method"]: (row["test"], row["test_change"], row["seeds"]) for row in rows}
    # one chunk, dropped, constant are 80, 79, 78 with one seed and 77, 76, 75 with the other
    assert found == {
        "one chunk": (78.5, 0.0, 2),
        "dropped": (77.5, -1.0, 2),
        "constant": (76.5, -2.0, 2),
    }


def test_the_committed_table_is_that_of_the_committed_runs(
    benchmark: dict[str, ModuleType], tmp_path: Path
) -> None:
    rows = benchmark["report"].summarize(benchmark["cells"].read_cells(FOLDER / "cells.csv"))
    benchmark["report"].write_rows(tmp_path / "accuracy.csv", rows)
    assert (tmp_path / "accuracy.csv").read_text() == (FOLDER / "accuracy.csv").read_text()
