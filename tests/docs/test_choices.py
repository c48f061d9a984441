"""What a user may choose stands in a table of the docs: where it is best, or the paper it is of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import lightning_gnnpipe
from lightning_gnnpipe.callbacks.staleness import RefreshHow
from lightning_gnnpipe.types import (
    ChangingInputs,
    CodecName,
    CrossChunkEdges,
    OrderName,
    PartitionMethod,
    ScheduleName,
    StalenessName,
)

PAGES = Path(__file__).parents[2] / "docs"
VALUES = {
    name: get_args(kind)
    for name, kind in {
        "staleness": StalenessName,
        "codec": CodecName,
        "chunk_order": OrderName,
        "schedule": ScheduleName,
        "partition": PartitionMethod,
        "cross_chunk_edges": CrossChunkEdges,
        "how": RefreshHow,
        "changing_inputs": ChangingInputs,
    }.items()
}
CHOICES = [(option, value) for option, values in VALUES.items() for value in values]
NAMES = [name for name in lightning_gnnpipe.__all__ if not name.startswith("_")]


def rows() -> list[str]:
    """Return the rows of all tables."""
    pages = (path for path in sorted(PAGES.glob("*.md")) if path.name != "troubleshooting.md")
    text = "\n".join(path.read_text() for path in pages)
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(("option", "value"), CHOICES)
def test_a_value_stands_in_a_table(option: str, value: str) -> None:
    quoted = re.compile(rf"[`\"(]\"?{re.escape(value)}\"?[`\")]|\b{option}\w*=\"{value}\"")
    assert any(quoted.search(row) for row in rows())


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_in_a_table(name: str) -> None:
    assert any(re.search(rf"`{name}\b", row) for row in rows())
