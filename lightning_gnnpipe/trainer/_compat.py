"""Private names of Lightning that the package uses, under public names.

`tests/test_compat.py` lists them, and fails if one disappears.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities import cloud_io, distributed
from lightning.fabric.utilities import types as fabric_types
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import ParallelStrategy, launchers
from torch import nn

from lightning_gnnpipe.passing import replace_attributes

PathLike: TypeAlias = fabric_types._PATH
SubprocessScriptLauncher = launchers._SubprocessScriptLauncher
MultiProcessingLauncher = launchers._MultiProcessingLauncher
default_backend = distributed._get_default_process_group_backend_for_device
init_dist_connection = distributed._init_dist_connection
load_file = cloud_io._load
reduce_over = distributed._sync_ddp_if_available
divide_threads = distributed._set_num_threads_if_needed


# The class `WeightAveraging`; nothing before Lightning 2.6.
WEIGHT_AVERAGING: Any = getattr(pl_callbacks, "WeightAveraging", ())
# Callbacks that read or change all weights in each step.
READERS = StochasticWeightAveraging, ModelPruning, WEIGHT_AVERAGING


def average_of(callback: Callback) -> nn.Module | None:
    """Return the copy of the LightningModule in which `callback` averages weights, or None."""
    if isinstance(callback, StochasticWeightAveraging):
        return callback._average_model
    if isinstance(callback, WEIGHT_AVERAGING):
        return getattr(callback._average_model, "module", None)
    return None


def skips_backward(trainer: Trainer) -> bool:
    """Whether this epoch only updates running statistics, after weights were averaged."""
    return bool(trainer.fit_loop._skip_backward)


def skips_batches(trainer: Trainer, *, is_end: bool) -> bool:
    """Whether the fit ends here, or a validation begins, only because of `should_stop`."""
    loop = trainer.fit_loop
    if not trainer.should_stop or not loop._can_stop_early:
        return False
    if is_end:
        is_last = trainer.is_last_batch and 0 <= (trainer.max_epochs or 0) <= trainer.current_epoch
        return not (is_last or 0 <= trainer.max_steps <= trainer.global_step)
    assert loop._data_fetcher is not None
    trainer.should_stop = False
    try:
        return not loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
    finally:
        trainer.should_stop = True


def without_signal_messages(trainer: Trainer) -> AbstractContextManager[None]:
    """Leave out the message that Lightning sends before each batch, since 2.6, within the block.

    A rank that alone begins a batch would wait for it; see `StopSignals`.
    """
    name, loop = "_broadcast_sigterm_tensor", trainer.fit_loop.epoch_loop
    return replace_attributes(loop, {name: lambda: None} if hasattr(loop, name) else {})


def validates_by_time(trainer: Trainer) -> bool:
    """Whether a validation begins after so many seconds; possible since Lightning 2.6."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def keep_samplers(trainer: Trainer) -> AbstractContextManager[None]:
    """Make the Trainer keep the loaders' samplers within the block."""
    connector = trainer._accelerator_connector
    return replace_attributes(connector, {"use_distributed_sampler": False})


class LightningStrategy(ParallelStrategy):
    """A `ParallelStrategy`, one process per device, with public names for its hooks."""

    num_nodes = 1
    make_launcher: Callable[[], Any]  # of processes; None if they run already
    make_checkpoint_io: Callable[[], CheckpointIO]

    @property
    def user_module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def trainer(self) -> Trainer | None:
        """None before the run, and in the process that started the ranks."""
        return None if self.lightning_module is None else self.lightning_module._trainer

    @property
    def syncs_norms(self) -> bool:
        """Whether the user set the Trainer's `sync_batchnorm`."""
        return self._layer_sync is not None

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """True: Lightning treats loaders and logging as distributed."""
        return True

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = self.make_checkpoint_io()
        io = self._checkpoint_io
        if hasattr(io, "checkpoint_io"):  # a plugin that wraps another
            io.checkpoint_io = self.make_checkpoint_io()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _configure_launcher(self) -> None:
        self._launcher = self.make_launcher()


def last_saved_step(callback: ModelCheckpoint) -> int:
    """Return the global step of the last save of `callback`."""
    return callback._last_global_step_saved


def read_checkpoint(io: CheckpointIO, path: PathLike, weights_only: bool | None) -> Any:
    """Read by `io`, whose method lacks `weights_only` before Lightning 2.6."""
    parameters = inspect.signature(io.load_checkpoint).parameters.values()
    if any(one.name == "weights_only" or one.kind is one.VAR_KEYWORD for one in parameters):
        reader: Any = io
        return reader.load_checkpoint(path, weights_only=weights_only)
    return io.load_checkpoint(path)
