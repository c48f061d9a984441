"""Deep GNNs on the whole graph, their layers pipelined over devices, under PyTorch Lightning."""

from __future__ import annotations

from lightning_gnnpipe.callbacks import HistoryRefresh, StalenessMonitor, StalenessWarmup
from lightning_gnnpipe.datamodule import FullGraphDataModule
from lightning_gnnpipe.registry import register_strategies
from lightning_gnnpipe.strategy import GNNPipeStrategy

__version__ = "0.1.0"

__all__ = [
    "FullGraphDataModule",
    "GNNPipeStrategy",
    "HistoryRefresh",
    "StalenessMonitor",
    "StalenessWarmup",
    "__version__",
]

register_strategies()
