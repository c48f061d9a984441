"""Lightning's side: processes, replicas, checkpoints, and the engine within Lightning's loops."""

from __future__ import annotations

from lightning_gnnpipe.trainer._compat import (
    LightningStrategy,
    PathLike,
    optimizers_to_device,
)
from lightning_gnnpipe.trainer.checkpoints import AtomicCheckpointIO, Checkpoints
from lightning_gnnpipe.trainer.engine_host import EngineHost
from lightning_gnnpipe.trainer.launcher import random_state, set_random_state
from lightning_gnnpipe.trainer.processes import Processes
from lightning_gnnpipe.trainer.refuse import refuse_import
from lightning_gnnpipe.trainer.replicas import Replicas

__all__ = [
    "AtomicCheckpointIO",
    "Checkpoints",
    "EngineHost",
    "LightningStrategy",
    "PathLike",
    "Processes",
    "Replicas",
    "optimizers_to_device",
    "random_state",
    "refuse_import",
    "set_random_state",
]
