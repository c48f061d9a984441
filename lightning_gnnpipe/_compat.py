"""The private names of Lightning that a strategy outside of it must use, all in one place."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import (
    _init_dist_connection as init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.call import _interrupt
from torch import nn

__all__ = [
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "average_of",
    "default_backend",
    "init_dist_connection",
    "interrupt",
    "optimizers_to_device",
    "signal_connector",
    "skips_backward",
    "teardown",
]


def average_of(callback: Callback) -> nn.Module | None:
    """Return the copy of the LightningModule in which `callback` averages weights, if it does."""
    if isinstance(callback, StochasticWeightAveraging):
        return callback._average_model
    kind = getattr(pl_callbacks, "WeightAveraging", None)  # from Lightning 2.6
    if kind is not None and isinstance(callback, kind):
        return getattr(callback._average_model, "module", None)
    return None


def skips_backward(trainer: Trainer) -> bool:
    """Whether this epoch only renews running statistics, after weights have been averaged."""
    return bool(trainer.fit_loop._skip_backward)


def interrupt(trainer: Any, exception: BaseException) -> None:
    """Tell callbacks, strategy and loggers that the run ends by `exception`."""
    _interrupt(trainer, exception)


def teardown(trainer: Any) -> None:
    """Tear down what a run has set up."""
    trainer._teardown()


def signal_connector(trainer: Any) -> Any:
    """Return what handles signals for the Trainer."""
    return trainer._signal_connector
