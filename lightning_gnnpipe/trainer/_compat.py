"""Private names of Lightning that the package uses, under public names.

`tests/test_compat.py` lists them, and fails if one disappears.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities import cloud_io, distributed, imports
from lightning.fabric.utilities import optimizer as fabric_optimizer
from lightning.fabric.utilities import types as fabric_types
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import ParallelStrategy, launchers
from lightning.pytorch.trainer import call
from torch import nn

PathLike: TypeAlias = fabric_types._PATH
SubprocessScriptLauncher = launchers._SubprocessScriptLauncher
default_backend = distributed._get_default_process_group_backend_for_device
init_dist_connection = distributed._init_dist_connection
interrupt = call._interrupt
load_file = cloud_io._load
optimizers_to_device = fabric_optimizer._optimizers_to_device
reduce_over = distributed._sync_ddp_if_available


def is_interactive() -> bool:
    """Whether this is a notebook or an interactive shell, as Lightning finds it."""
    return imports._IS_INTERACTIVE


# The class `WeightAveraging`; nothing before Lightning 2.6.
WEIGHT_AVERAGING: Any = getattr(pl_callbacks, "WeightAveraging", ())


def syncs_norms(strategy: Any) -> bool:
    """Whether the user set the Trainer's `sync_batchnorm`."""
    return strategy._layer_sync is not None


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


def validates_next(trainer: Trainer) -> bool:
    """Whether a training batch has just ended and validation follows."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches: Any = loop.batch_progress.current
    has_ended = batches.processed > batches.completed  # called between the two
    return has_ended and fetcher is not None and loop._should_check_val_fx(fetcher)


def keep_samplers(trainer: Trainer) -> Callable[[], None]:
    """Make the Trainer keep the loaders' samplers; return an undo function."""
    connector: Any = trainer._accelerator_connector
    before, connector.use_distributed_sampler = connector.use_distributed_sampler, False
    return lambda: setattr(connector, "use_distributed_sampler", before)


_WRONG_ADVICE = (
    ".*recommended to use `self.log.*sync_dist=True",  # logged values are equal on all ranks
    r".*number of training batches \(1\) is smaller",  # as with a whole graph
)


def without_wrong_advice() -> Callable[[], None]:
    """Silence advice of Lightning that is wrong here; return an undo function."""
    own: list[Any] = []
    for text in _WRONG_ADVICE:
        warnings.filterwarnings("ignore", message=text)
        own.append(warnings.filters[0])

    def undo() -> None:
        for one in own:
            if one in warnings.filters:
                warnings.filters.remove(one)  # type: ignore[attr-defined]

    return undo


def fetcher_of(trainer: Trainer) -> Any:
    """Return the running loop's fetcher; None if the user's step fetches (`dataloader_iter`)."""
    fetcher = trainer._active_loop._data_fetcher  # type: ignore[union-attr]
    return None if isinstance(fetcher, _DataLoaderIterDataFetcher) else fetcher


class LightningStrategy(ParallelStrategy):
    """A `ParallelStrategy`, one process per device, with public names for its hooks."""

    num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """True: Lightning treats loaders and logging as distributed."""
        return True

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def make_launcher(self) -> Any:
        """Return the launcher of processes; None if they run already."""
        raise NotImplementedError

    def make_checkpoint_io(self) -> CheckpointIO:
        """Return the default checkpoint plugin."""
        raise NotImplementedError

    def reset_optimizers(self) -> None:
        """Forget the optimizers and schedulers of an earlier run."""
        self._reset_optimizers_and_schedulers()

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

    def forget_launcher(self) -> None:
        """Be a process that has been started and starts none: Lightning lets it return outputs."""
        self._launcher = None

    def _configure_launcher(self) -> None:
        self._launcher = self.make_launcher()


class MultiProcessingLauncher(launchers._MultiProcessingLauncher):
    """Lightning's launcher of workers, with public names for its two ends."""

    def run_worker(
        self, index: int, trainer: Trainer, results: Any, work: Callable[[], Any]
    ) -> None:
        """Run `work`, which puts its result in `results`, in a worker."""
        raise NotImplementedError

    def pack(self, trainer: Trainer, results: Any) -> Any:
        """Return what worker 0 sends for `results`, which the function that ran has returned."""
        raise NotImplementedError

    def check_result(self, result: Any) -> None:
        """Check worker 0's result, in the process that started it."""
        raise NotImplementedError

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        assert trainer is not None
        run = super()._wrapping_function
        self.run_worker(
            process_idx,
            trainer,
            return_queue,
            lambda: run(process_idx, trainer, function, args, kwargs, return_queue, global_states),
        )

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        results = self.pack(trainer, results) if trainer.local_rank == 0 else None
        return super()._collect_rank_zero_results(trainer, results)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        self.check_result(worker_output)
        super()._recover_results_in_main_process(worker_output, trainer)


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the Trainer of `module`; None if it has none."""
    return None if module is None else module._trainer


def teardown(trainer: Trainer) -> None:
    """Tear down a run."""
    trainer._teardown()


def requeue_handler(trainer: Trainer) -> Callable[[int, Any], None]:
    """Return Lightning's handler that saves and requeues the SLURM job."""
    return trainer._signal_connector._slurm_sigusr_handler_fn


def handle_signals(
    trainer: Trainer, on_stop: Callable[[int, Any], None], on_requeue: Callable[[int, Any], None]
) -> None:
    """Replace the Trainer's handlers of SIGTERM and of SLURM's requeue signal."""
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = on_stop
    connector._slurm_sigusr_handler_fn = on_requeue


def stop_at_the_end_of_the_batch(trainer: Trainer) -> None:
    """Stop the Trainer after this batch, as on SIGTERM."""
    trainer._signal_connector.received_sigterm = True


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
