"""What is there because of Lightning: processes, checkpoints, precision, callbacks, loops."""

from __future__ import annotations

from lightning_gnnpipe.trainer.engine_host import PipeLoops, print_stages, shows_stages
from lightning_gnnpipe.trainer.launcher import random_state
from lightning_gnnpipe.trainer.precision import loss_scale
from lightning_gnnpipe.trainer.refuse import (
    check_optimizers,
    check_scaling,
    check_sync,
    check_was_called,
)

__all__ = [
    "PipeLoops",
    "check_optimizers",
    "check_scaling",
    "check_sync",
    "check_was_called",
    "loss_scale",
    "print_stages",
    "random_state",
    "shows_stages",
]
