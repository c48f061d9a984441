"""Deep GNNs on the whole graph, their layers pipelined over devices, under PyTorch Lightning."""

from __future__ import annotations

import sys
from typing import NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gnnpipe.callbacks import (
    BoundedStaleness,
    EmbeddingRefresh,
    PipelineMonitor,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.datamodule import FullGraphDataModule, prepare_graph
from lightning_gnnpipe.errors import REMOVED_CLASSES
from lightning_gnnpipe.strategy import GNNPipeStrategy
from lightning_gnnpipe.synthetic import make_communities
from lightning_gnnpipe.trainer.engine_host import refuse_import

__version__ = "0.1.0"

__all__ = [
    "BoundedStaleness",
    "EmbeddingRefresh",
    "FullGraphDataModule",
    "GNNPipeStrategy",
    "PipelineMonitor",
    "StalenessMonitor",
    "StalenessWarmup",
    "TimelineCallback",
    "__version__",
    "make_communities",
    "prepare_graph",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> NoReturn:
    if name in REMOVED_CLASSES:
        raise ImportError(f"{__name__}.{name} was removed. {REMOVED_CLASSES[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The names for `Trainer(strategy="gnnpipe")`, each with the way in which it starts processes.
for _name, _start_method in {
    "gnnpipe": "popen",
    "gnnpipe_fork": "fork",
    "gnnpipe_notebook": "fork",
}.items():
    StrategyRegistry.register(
        _name,
        GNNPipeStrategy,
        description=f"GNNPipe, processes started by {_start_method}",
        override=True,
        start_method=_start_method,
    )
    if "pytorch_lightning" in sys.modules:
        sys.modules["pytorch_lightning"].strategies.StrategyRegistry.register(
            _name, refuse_import, override=True
        )
