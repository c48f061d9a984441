"""A run leaves the process as it was, also one that an error ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
import torch_geometric.utils
from torch_geometric.data import Data
from torch_geometric.nn.conv import gcn_conv, han_conv

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.models import GNN, NodeClassifier

MODULES = (torch, torch.distributed, torch_geometric.utils, gnn, gcn_conv, han_conv)
CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Linear, gnn.MessagePassing, gnn.GCNConv)


def process_state(trainer: L.Trainer) -> dict[str, Any]:
    connector: Any = trainer._accelerator_connector
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    loggers = ("", "lightning", "lightning.pytorch", "torch", "lightning_gnnpipe")
    state = {
        "warnings": list(warnings.filters),
        "show": warnings.showwarning,
        "signals": {one: signal.getsignal(one) for one in signal.valid_signals()},
        "wakeup": fd,
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, sys.displayhook, threading.excepthook),
        "levels": {one: (logging.getLogger(one).level, logging.raiseExceptions) for one in loggers},
        "threads": {one.name for one in threading.enumerate()} - {"tqdm_monitor"},
        "torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.distributed.is_initialized(),
        ),
        "samplers": connector.use_distributed_sampler,
        "aggregation": gnn.Aggregation.__call__,
    }
    for owner in (*MODULES, *CLASSES):
        own = {name: id(value) for name, value in vars(owner).items() if callable(value)}
        state[f"names of {owner.__name__}"] = own
    return state


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_the_process_as_it_was(fails: bool, tmp_path: Any) -> None:
    class Module(NodeClassifier):
        def training_step(self, *args: Any) -> Any:
            loss = super().training_step(*args)
            if fails and self.current_epoch == 1:
                raise KeyError("a mistake")
            return loss

    ring = torch.arange(30)
    data = Data(x=torch.eye(30), edge_index=torch.stack([ring, (ring + 1) % 30]), y=ring % 3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        strategy=GNNPipeStrategy(num_chunks=3),
    )
    module = Module(GNN(30, 8, 3, num_layers=4), 3)
    loader = FullGraphDataModule(data)
    before = process_state(trainer)
    if fails:
        with pytest.raises(KeyError, match="a mistake"):
            trainer.fit(module, datamodule=loader)
    else:
        trainer.fit(module, datamodule=loader)
        trainer.validate(module, datamodule=loader, verbose=False)
    after = process_state(trainer)
    for key, value in before.items():
        assert after[key] == value, key
