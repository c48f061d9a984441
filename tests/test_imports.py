"""P9: folders import one way, and heavy imports stay where they belong.

A reader can follow a training step: it enters at most 32 files of the package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import pytest
from torch_geometric.nn.models import GCN

from lightning_gnnpipe import FullGraphDataModule
from tests.helpers.observed import make_trainer
from tests.test_user_errors import Module, graph

PACKAGE = Path(__file__).parent.parent / "lightning_gnnpipe"
NAME = PACKAGE.name
# Of the package, for 4 layers and 8 chunks.
MAX_FILES_OF_A_STEP = {1: 32, 2: 37}  # by number of stages, on rank 0
MAX_FUNCTIONS_OF_A_STEP = 295
MAX_CALLS_OF_A_STEP = 1_800

# Folders and files, from the bottom up: each may import those before it, none behind it.
LINE = (
    *("errors", "types", "_compat_torch", "_compat_pyg"),
    *("user_code", "models"),
    *("graph", "datamodule", "synthetic"),
    *("staleness", "codecs", "options", "passing", "calls", "comm"),
    *("layers", "stages", "methods", "chunks", "report"),
    *("selfcheck", "steps"),
    *("planning", "engine", "trainer", "strategy"),
    *("callbacks", "cli"),
    "__init__",
)
LIGHTNING = {
    *("__init__", "strategy", "trainer", "planning", "callbacks", "datamodule", "models", "cli"),
}
DISTRIBUTED = {"comm", "trainer", "_compat_torch"}


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
def test_p9_imports_go_one_way_and_heavy_ones_stay_in_their_place(path: Path) -> None:
    part = part_of(path)
    for name in imports(path):
        target = name.split(".")[1] if name.startswith(f"{NAME}.") else part
        if target != part and target in LINE:
            assert LINE.index(target) < LINE.index(part), f"{part} imports {target}"
        root = name.split(".")[0]
        if root in ("lightning", "pytorch_lightning"):
            assert part in LIGHTNING, f"{part} imports {name}"
        if name.startswith("torch.distributed"):
            assert part in DISTRIBUTED, f"{part} imports {name}"
        if root == "pymetis":
            assert path.name == "partition.py"
        if root == "matplotlib":
            assert (part, path.name) == ("callbacks", "timeline.py")
        if part == "models":
            assert root != NAME or path.name == "__init__.py", "models import nothing of ours"


def test_p9_the_line_has_all_parts() -> None:
    assert sorted({part_of(path) for path in modules()}) == sorted(LINE)


class Profile(L.Callback):
    """Writes the functions of the package that one step calls on rank 0, a line for each call."""

    def __init__(self, path: Path) -> None:
        self.path, self.epoch = path, 5
        self.calls: list[str] = []
        self.before: Callable[[FrameType, str, Any], object] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.is_global_zero:
            self.before = sys.getprofile()
            sys.setprofile(self.note)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.is_global_zero:
            sys.setprofile(self.before)
            self.path.write_text("\n".join(self.calls))

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self.calls.append(f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}")


class Validated(Module):
    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.net(data.x, data.edge_index)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_p9_a_step_enters_few_files_and_makes_few_calls(num_stages: int, tmp_path: Path) -> None:
    data, path = graph(), tmp_path / "calls"
    module = Validated(GCN(data.num_features, 8, 4, int(data.y.max()) + 1))
    trainer = make_trainer(num_stages, 8, Profile(path), max_epochs=7)
    trainer.fit(module, FullGraphDataModule(data))
    calls = path.read_text().splitlines()
    files = sorted({call.split(":")[0].removeprefix(f"{PACKAGE}/") for call in calls})
    assert "staleness/store.py" in files  # it was a pipelined step
    assert len(files) <= MAX_FILES_OF_A_STEP[num_stages], " ".join(files)
    if num_stages == 1:
        assert len(set(calls)) <= MAX_FUNCTIONS_OF_A_STEP
        assert len(calls) <= MAX_CALLS_OF_A_STEP
