"""Trainers to compare: plain Lightning on one device, and the strategy with exact epochs only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.types import StartMethod
from tests.helpers.realistic import Realistic, realistic_graph
from tests.helpers.record import as_held


@contextmanager
def double_precision() -> Iterator[None]:
    """Have new tensors in float64 within the block."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_trainer(
    num_stages: int, epochs: int, *callbacks: L.Callback, num_shards: int = 1, **kwargs: Any
) -> L.Trainer:
    """Return a Trainer; 0 stages is plain Lightning, otherwise all epochs are exact.

    Processes are forked, unless they are there already.
    """
    strategy: Any = "auto"
    if num_stages:
        strategy = GNNPipeStrategy(
            num_chunks=4, graph_parallel=num_shards, start_method=start_method()
        )
        callbacks = (*callbacks, StalenessWarmup(num_epochs=1000))
    has_checkpoints = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": max(num_stages, 1) * num_shards,
            "strategy": strategy,
            "max_epochs": epochs,
            "callbacks": list(callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": has_checkpoints,
            "logger": False,
            **kwargs,
        },
    )


def start_method() -> StartMethod:
    """Return how processes are to be started: by nobody, if torchrun has."""
    return "popen" if "TORCHELASTIC_RUN_ID" in os.environ else "fork"


def make_module(**kwargs: Any) -> Realistic:
    L.seed_everything(1, verbose=False)
    return Realistic(**kwargs)


def datamodule() -> FullGraphDataModule:
    return FullGraphDataModule(realistic_graph())


def weights(module: torch.nn.Module) -> torch.Tensor:
    """Return all parameters of `module` as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def assert_same(found: L.LightningModule, expected: L.LightningModule) -> None:
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-10)


def overflow(module: L.LightningModule, parameter: torch.nn.Parameter) -> None:
    """Let a gradient overflow on the rank alone that has the parameter."""
    with as_held(module.trainer):
        if parameter.grad is not None:
            parameter.grad *= torch.inf
