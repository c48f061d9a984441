"""P9: imports go one way along the line of modules, and heavy ones stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_gnnpipe"
NAME = PACKAGE.name

# What each part may import of ours; these are open to all.
SHARED = {"types", "errors", "fallbacks", "removed", "nested", "user_code"}
SHARED |= {"_compat_pyg", "_compat_torch"}
PARTS = ("graph", "stages", "passing", "schedule", "history", "comm")
ALLOWED: dict[str, set[str]] = {
    **{part: set() for part in PARTS},
    "types": set(),
    "errors": set(),
    "user_code": set(),
    "fallbacks": set(),
    "removed": set(),
    "nested": set(),
    "controls": set(),
    "axis_options": set(),
    "idle_options": set(),
    "options": {"axis_options", "comm", "engine", "history", "idle_options"},
    "metrics": set(),
    "loaders": set(),
    "models": set(),
    "datamodule": set(),
    "_compat": set(),
    "_compat_pyg": set(),
    "_compat_torch": set(),
    "engine": {*PARTS, "controls"},
    "randomness": set(),
    "launcher": {"randomness", "_compat"},
    "processes": {"comm", "launcher", "options", "randomness", "_compat"},
    "sidecar": set(),
    "sharded": {"comm"},
    "checkpoint_io": {"_compat"},
    "signals": {"_compat", "engine"},
    "checkpoints": {
        "_compat",
        "checkpoint_io",
        "engine",
        "processes",
        "randomness",
        "sharded",
        "sidecar",
        "signals",
    },
    "replicas": {"_compat", "checkpoints", "loaders"},
    "loops": {
        "_compat",
        "controls",
        "engine",
        "guests",
        "hook_ends",
        "metrics",
        "next_batch",
        "passing",
        "precision",
        "randomness",
        "refuse",
        "replay",
        "replicas",
        "stages",
    },
    "refuse": set(),
    "replay": {"randomness"},
    "guests": {"engine", "_compat"},
    "hook_ends": set(),
    "next_batch": {"_compat", "loaders"},
    "strategy": {
        *PARTS,
        "_compat",
        "engine",
        "loops",
        "options",
        "planning",
        "precision",
        "randomness",
        "refuse",
        "summary",
    },
    "planning": {"comm", "engine", "options", "stages"},
    "precision": {"comm", "engine"},
    "report": {"engine", "schedule", "stages"},
    "summary": {"report", "stages"},
    "registry": {"strategy"},
    "plan_tables": {"engine"},
    "cli_parser": set(),
    "cli": {"cli_parser", "strategy", "models", "plan_tables"},
    "callbacks": {"strategy", "controls", "history", "report"},
    "__init__": {"strategy", "registry", "callbacks", "datamodule", "history"},
}
LIGHTNING = {
    "cli",
    "cli_parser",
    "launcher",
    "signals",
    "strategy",
    "registry",
    "processes",
    "checkpoint_io",
    "checkpoints",
    "refuse",
    "replay",
    "guests",
    "hook_ends",
    "next_batch",
    "loops",
    "planning",
    "replicas",
    "precision",
    "summary",
    "_compat",
    "callbacks",
    "datamodule",
    "models",
}
DISTRIBUTED = {"comm", "processes", "_compat_torch"}


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
        if not name.startswith(f"{NAME}."):
            continue
        target = name.split(".")[1]
        if (PACKAGE / target).exists() or (PACKAGE / f"{target}.py").exists():
            assert target in {part} | SHARED | ALLOWED[part], f"{part} imports {target}"


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
