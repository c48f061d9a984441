"""The cells of cells.yaml, as objects: each a network, a graph, a task and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import yaml  # type: ignore[import-untyped]

CELLS = Path(__file__).parent / "cells.yaml"


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table; the fields are the keys of cells.yaml."""

    name: str
    graph: str
    task: str
    conv: str
    norm: str
    layers: int
    hidden: int
    dropout: float
    skip: str  # none, linear or residual
    optimizer: str
    lr: float
    schedule: str
    epochs: int
    chunks: int
    partition: str
    validate: bool  # after each epoch; else once, when training has ended
    jump: bool = False  # JumpingKnowledge
    decay: float = 0.0  # of weights

    @property
    def gives_embeddings(self) -> bool:
        """Whether validation computes what histories hold: no norm looks at all nodes."""
        return self.validate and self.norm in ("none", "layer") and self.conv != "gin"

    @property
    def lower_is_better(self) -> bool:
        """Whether the metric of the task is a loss."""
        return self.task in ("autoencoder", "links")


def read_cells(pattern: str = "*") -> list[Cell]:
    """Return the cells whose names match `pattern`, one or several joined by commas.

    Raises:
        ValueError: If two cells have one name, or none matches.
    """
    cells = [Cell(**fields) for fields in yaml.safe_load(CELLS.read_text())["cells"]]
    if len({cell.name for cell in cells}) < len(cells):
        raise ValueError("Expected each cell of cells.yaml to have a name of its own.")
    found = [c for c in cells if any(fnmatch(c.name, one) for one in pattern.split(","))]
    if not found:
        names = ", ".join(cell.name for cell in cells)
        raise ValueError(f"Expected a cell that matches {pattern!r}, among {names}.")
    return found
