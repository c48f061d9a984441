"""What the programs of these tests train: a network on a ring of 30 nodes."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.models import GNN, NodeClassifier
from tests.helpers.scripts import ROOT

torch.set_num_threads(1)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a new program."""
    path = os.environ.get("PATH", "")
    return {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def make_net() -> GNN:
    return GNN(30, 8, 3, num_layers=4, dropout=0.1)


def make_module() -> NodeClassifier:
    L.seed_everything(0, verbose=False)
    return NodeClassifier(make_net(), 3)


def fit(
    module: L.LightningModule,
    *callbacks: L.Callback,
    strategy: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> L.Trainer:
    node = torch.arange(30)
    data = Data(x=torch.eye(30), edge_index=torch.stack([node, (node + 1) % 30]), y=node % 3)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=GNNPipeStrategy(**(strategy or {})),
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 2, "max_epochs": 4, "enable_checkpointing": False, **options},
    )
    trainer.fit(module, datamodule=FullGraphDataModule(data), ckpt_path=ckpt_path)
    return trainer
