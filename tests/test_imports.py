"""P9: folders import one way, and heavy imports stay where they belong.

A reader can follow a training step: it enters at most 42 files of the package.
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
MAX_FILES_OF_A_STEP = 42
MAX_CALLS_OF_A_STEP = 2_100  # of the package, for 4 layers and 8 chunks

# Folders and files, from the bottom up: each may import those before it, none behind it.
LINE = (
    *("errors", "types", "_compat_torch", "_compat_pyg"),
    *("user_code", "datamodule", "models"),
    *("graph", "staleness", "codecs", "options", "passing", "calls", "comm"),
    *("layers", "stages", "methods", "chunks", "report"),
    *("selfcheck", "steps"),
    *("batches", "planning", "engine", "trainer", "strategy"),
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
    """Notes the files whose functions the step of one epoch calls."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.files: set[str] = set()
        self.num_calls = 0
        self.before: Callable[[FrameType, str, Any], object] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.before = sys.getprofile()
            sys.setprofile(self.note)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            sys.setprofile(self.before)

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.files.add(frame.f_code.co_filename)
            self.num_calls += 1


class Validated(Module):
    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.net(data.x, data.edge_index)


def test_p9_a_step_enters_few_files_and_makes_few_calls() -> None:
    profile, data = Profile(epoch=5), graph()
    module = Validated(GCN(data.num_features, 8, 4, int(data.y.max()) + 1))
    make_trainer(1, 8, profile, max_epochs=7).fit(module, FullGraphDataModule(data))
    names = sorted(Path(one).relative_to(PACKAGE).as_posix() for one in profile.files)
    assert "staleness/store.py" in names  # it was a pipelined step
    assert len(names) <= MAX_FILES_OF_A_STEP, names
    assert profile.num_calls <= MAX_CALLS_OF_A_STEP
