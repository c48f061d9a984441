"""A run that can be killed at any time and goes on from its last checkpoint when started again.

Run by `main.py`. Each rank writes its process id and the epochs it has ended to a file of its own.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.models import GCNII, NodeClassifier

NUM_NODES, NUM_EDGES, NUM_CLASSES = 600, 3000, 4


class Heartbeat(L.Callback):
    """Writes `<process id> <epoch>` whenever an epoch ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _beat(self, trainer: L.Trainer) -> None:
        part = self.folder / f".rank_{trainer.global_rank}"
        part.write_text(f"{os.getpid()} {trainer.current_epoch}")
        part.replace(self.folder / f"rank_{trainer.global_rank}")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._beat(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._beat(trainer)


def make_data() -> Data:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(NUM_CLASSES, (NUM_NODES,), generator=generator)
    return Data(
        x=torch.randn(NUM_NODES, 16, generator=generator) + y[:, None],
        edge_index=torch.randint(NUM_NODES, (2, NUM_EDGES), generator=generator),
        y=y,
    )


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    saver = ModelCheckpoint(options.folder / "checkpoints", save_last=True, every_n_epochs=1)
    strategy: Any = GNNPipeStrategy(
        num_chunks=6,
        timeout=timedelta(seconds=20),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.stages,
        strategy=strategy,
        max_epochs=options.epochs,
        callbacks=[saver, StalenessWarmup(num_epochs=2), Heartbeat(options.folder)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = NodeClassifier(GCNII(16, 16, NUM_CLASSES, 8, dropout=0.3), NUM_CLASSES)
    trainer.fit(module, datamodule=FullGraphDataModule(make_data()), ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(module.state_dict(), options.folder / "weights.pt")


if __name__ == "__main__":
    main()
