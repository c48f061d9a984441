"""P9: a reader can follow a training step. It enters at most 50 files of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy

PACKAGE = str(Path(__file__).parent.parent / "lightning_gnnpipe")
MAX_FILES = 50


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GCNConv(8, 8) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(data.x, data.edge_index), data.y)

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.net(data.x, data.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Profile(L.Callback):
    """Notes the files whose functions the step of one epoch calls."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.files: set[str] = set()
        self.before: Callable[[FrameType, str, Any], object] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.before = sys.getprofile()
            sys.setprofile(self.note)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            sys.setprofile(self.before)

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename)


def test_p9_a_step_enters_at_most_50_files() -> None:
    torch.manual_seed(0)
    num_nodes = 200
    data = Data(x=torch.randn(num_nodes, 8), edge_index=torch.randint(0, num_nodes, (2, 900)))
    data.y = torch.randint(0, 8, (num_nodes,))
    data.train_mask = data.val_mask = data.test_mask = data.y > 0
    profile = Profile(epoch=5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(num_chunks=4),
        max_epochs=7,
        callbacks=[profile],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), datamodule=FullGraphDataModule(data))
    names = sorted(Path(one).relative_to(PACKAGE).as_posix() for one in profile.files)
    assert "staleness/store.py" in names  # it was a pipelined step
    assert len(names) <= MAX_FILES, names
