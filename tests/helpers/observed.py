"""A small graph and a deep stack, fitted under the strategy with callbacks and loggers."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.models import GNN, NodeClassifier
from lightning_gnnpipe.types import StartMethod
from tests.helpers.trainers import quiet_trainer

NUM_NODES, NUM_FEATURES, WIDTH, NUM_CLASSES, NUM_LAYERS = 40, 5, 8, 3, 4


def make_module(dropout: float = 0.5) -> NodeClassifier:
    L.seed_everything(3, verbose=False)
    net = GNN(NUM_FEATURES, WIDTH, NUM_CLASSES, NUM_LAYERS, dropout=dropout)
    return NodeClassifier(net, NUM_CLASSES)


def make_data() -> FullGraphDataModule:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(NUM_NODES, NUM_FEATURES, generator=generator),
        edge_index=torch.randint(0, NUM_NODES, (2, 120), generator=generator),
        y=torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=generator),
    )
    return FullGraphDataModule(data)


def make_trainer(
    num_stages: int,
    num_chunks: int,
    *callbacks: L.Callback,
    start_method: StartMethod = "fork",
    strategy: dict[str, Any] | None = None,
    **kwargs: Any,
) -> L.Trainer:
    piped = {"num_chunks": num_chunks, "balance": "uniform", "start_method": start_method}
    options = {"max_epochs": 3, "callbacks": list(callbacks), **kwargs}
    return quiet_trainer(num_stages, {**piped, **(strategy or {})}, **options)


def fit(
    num_stages: int,
    *callbacks: L.Callback,
    num_chunks: int = 4,
    module: L.LightningModule | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> L.Trainer:
    trainer = make_trainer(num_stages, num_chunks, *callbacks, **options)
    trainer.fit(module or make_module(), make_data(), ckpt_path=ckpt_path)
    return trainer
