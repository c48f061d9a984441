"""Deep GNNs on the whole graph, their layers pipelined over devices, under PyTorch Lightning."""

from __future__ import annotations

from lightning_gnnpipe.callbacks import (
    AdaptiveHalo,
    AdaptiveStaleness,
    BoundedStaleness,
    ChunkProgress,
    PipelineMonitor,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.datamodule import FullGraphDataModule
from lightning_gnnpipe.history import (
    AdaptiveGradients,
    BlockGradients,
    DelayedGradients,
    DroppedGradients,
    ExtrapolatedRows,
    LastRows,
    RenewedRows,
    SmoothedRows,
    SnapshotRows,
    StalenessMethod,
)
from lightning_gnnpipe.registry import register_strategies
from lightning_gnnpipe.strategy import GNNPipeStrategy

__version__ = "0.1.0"

__all__ = [
    "AdaptiveGradients",
    "AdaptiveHalo",
    "AdaptiveStaleness",
    "BlockGradients",
    "BoundedStaleness",
    "ChunkProgress",
    "DelayedGradients",
    "DroppedGradients",
    "ExtrapolatedRows",
    "FullGraphDataModule",
    "GNNPipeStrategy",
    "LastRows",
    "PipelineMonitor",
    "RenewedRows",
    "SmoothedRows",
    "SnapshotRows",
    "StalenessMethod",
    "StalenessMonitor",
    "StalenessWarmup",
    "TimelineCallback",
    "__version__",
]

register_strategies()
