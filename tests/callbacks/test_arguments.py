"""Callbacks check what they are given, and what they are used with."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnnpipe import (
    ChunkProgress,
    FullGraphDataModule,
    GNNPipeStrategy,
    PipelineMonitor,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.models import GNN, NodeClassifier
from lightning_gnnpipe.steps import Controls


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_warmup_takes_a_number_of_epochs(value: object) -> None:
    with pytest.raises(ConfigError, match="'num_epochs' to be an integer of at least 0"):
        StalenessWarmup(value)


@pytest.mark.parametrize("kind", [PipelineMonitor, StalenessMonitor])
@pytest.mark.parametrize("value", [0, 2.0, True])
def test_monitors_take_a_number_of_epochs(kind: type[L.Callback], value: object) -> None:
    with pytest.raises(ConfigError, match="'every_n_epochs' to be an integer of at least 1"):
        kind(every_n_epochs=value)


@pytest.mark.parametrize("value", [-1, 2.0, "last"])
def test_timelines_take_an_epoch(value: object) -> None:
    with pytest.raises(ConfigError, match="'epoch' to be an integer of at least 0"):
        TimelineCallback(epoch=value)


def trainer(strategy: object, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=3,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def parts() -> tuple[NodeClassifier, FullGraphDataModule]:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(20, 4, generator=generator),
        edge_index=torch.randint(0, 20, (2, 50), generator=generator),
        y=torch.randint(0, 3, (20,), generator=generator),
    )
    return NodeClassifier(GNN(4, 8, 3, num_layers=2), 3), FullGraphDataModule(data)


@pytest.mark.parametrize(
    "callback",
    [
        ChunkProgress(),
        PipelineMonitor(),
        StalenessMonitor(),
        StalenessWarmup(1),
        TimelineCallback(),
    ],
)
def test_callbacks_need_the_strategy(callback: L.Callback) -> None:
    module, datamodule = parts()
    name = type(callback).__name__
    with pytest.raises(ConfigError, match=f"{name} to be used with GNNPipeStrategy"):
        trainer("auto", callback).fit(module, datamodule=datamodule)


def test_callbacks_leave_the_switches_off() -> None:
    strategy = GNNPipeStrategy(num_chunks=4)
    module, datamodule = parts()
    callbacks = (StalenessWarmup(9), StalenessMonitor())
    trainer(strategy, *callbacks).fit(module, datamodule=datamodule)
    controls = strategy.controls
    assert controls == Controls()
