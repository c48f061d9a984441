"""Deep GNNs on the whole graph, their layers pipelined over devices, under PyTorch Lightning."""

from __future__ import annotations

from typing import NoReturn

from lightning_gnnpipe.callbacks import (
    BoundedStaleness,
    ChunkProgress,
    EmbeddingRefresh,
    PipelineMonitor,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.datamodule import FullGraphDataModule
from lightning_gnnpipe.registry import register_strategies
from lightning_gnnpipe.removed import CLASSES
from lightning_gnnpipe.strategy import GNNPipeStrategy

__version__ = "0.1.0"

__all__ = [
    "BoundedStaleness",
    "ChunkProgress",
    "EmbeddingRefresh",
    "FullGraphDataModule",
    "GNNPipeStrategy",
    "PipelineMonitor",
    "StalenessMonitor",
    "StalenessWarmup",
    "TimelineCallback",
    "__version__",
]


def __getattr__(name: str) -> NoReturn:
    if name in CLASSES:
        raise ImportError(f"{__name__}.{name} was removed. {CLASSES[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_strategies()
