"""What a run of this benchmark is, and which runs are finished: a file with one line for each."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_gnnpipe.types import PartitionMethod

DATASETS = ("Cora", "CiteSeer", "PubMed")
METHODS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "dropped": {"cross_chunk_edges": "drop"},
    "constant": {"staleness": "constant"},
    "drift": {"staleness": "drift"},
    "gnnpipe": {"staleness": "gnnpipe"},
}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        dataset: Name of the graph.
        partition: How nodes are assigned to chunks.
        chunks: Chunks, K.
        method: What becomes of edges between chunks: a key of `METHODS`.
        warmup: Exact epochs at the start.
        epochs: Epochs.
        seed: Of weights and dropout; the chunks are the same for all seeds.
    """

    dataset: str
    partition: PartitionMethod
    chunks: int
    method: str
    warmup: int
    epochs: int
    seed: int


def read_cells(path: Path) -> dict[Cell, dict[str, float]]:
    """Return the finished runs."""
    if not path.exists():
        return {}
    kinds = {field.name: int if field.type == "int" else str for field in fields(Cell)}
    found = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = {name: kind(row.pop(name)) for name, kind in kinds.items()}
            found[Cell(**values)] = {name: float(value) for name, value in row.items()}
    return found


def write_cell(path: Path, cell: Cell, measured: dict[str, float]) -> None:
    """Add a finished run."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow([*asdict(cell), *measured])
        writer.writerow([*asdict(cell).values(), *(f"{v:.4f}" for v in measured.values())])
