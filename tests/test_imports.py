"""P9: folders import one way, heavy imports stay where they belong, and files can be found."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_gnnpipe"
NAME = PACKAGE.name
MAX_LINES = 400
MAX_FILES = 14

# Folders and files, from the bottom up: each may import those before it, none behind it.
LINE = (
    *("errors", "types", "removed", "_compat_torch", "_compat_pyg"),
    *("user_code", "datamodule", "models"),
    *("schedule", "graph", "staleness", "codecs", "passing", "calls", "comm"),
    *("layers", "stages", "saving", "chunks", "report", "selfcheck", "steps", "options"),
    *("batches", "planning", "engine", "trainer", "strategy"),
    *("callbacks", "preview", "cli"),
    "__init__",
)
LIGHTNING = {
    "__init__",
    "strategy",
    "trainer",
    "planning",
    "callbacks",
    "datamodule",
    "models",
    "cli",
    "preview",
}
DISTRIBUTED = {"comm", "saving", "trainer", "_compat_torch"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_p9_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for name in imports(path):
        target = name.split(".")[1] if name.startswith(f"{NAME}.") else part
        if target != part and target in LINE:
            assert LINE.index(target) < LINE.index(part), f"{part} imports {target}"


def test_p9_the_line_has_all_parts() -> None:
    assert sorted({part_of(path) for path in modules()}) == sorted(LINE)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_p9_heavy_imports_stay_in_their_place(path: Path) -> None:
    part = part_of(path)
    for name in imports(path):
        root = name.split(".")[0]
        if root in ("lightning", "pytorch_lightning"):
            assert part in LIGHTNING, f"{part} imports {name}"
        if name.startswith("torch.distributed"):
            assert part in DISTRIBUTED, f"{part} imports {name}"
        if root == "pymetis":
            assert path.name == "partition.py"
        if root == "matplotlib":
            assert part == "report" or (part, path.name) == ("callbacks", "timeline.py")
        if part == "schedule":
            assert root not in ("torch", "torch_geometric", "numpy")
        if part == "models":
            assert root != NAME or path.name == "__init__.py", "models import nothing of ours"


def test_no_base_name_stands_twice() -> None:
    names = Counter(path.name for path in modules() if path.name != "__init__.py")
    assert [name for name, number in names.items() if number > 1] == []


def test_folders_and_files_are_small_enough_to_find_things() -> None:
    folders = Counter(path.parent for path in modules())
    assert {folder.name: n for folder, n in folders.items() if n > MAX_FILES} == {}
    lengths = {path.name: len(path.read_text().splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
