"""Signals that ask a run to stop, or to be queued again: noted when they come, obeyed together.

Lightning's own handlers talk to other ranks at once, in the middle of a step: messages of the
pipeline are in flight then, and ranks would wait for each other for ever. Here a handler sets a
flag. All ranks see it at the next pipelined forward, finish the batch, save, and end.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gnnpipe.steps import StepContext
from lightning_gnnpipe.trainer import _compat

log = logging.getLogger(__name__)

STOP = 1  # SIGTERM
REQUEUE = 2  # the signal of SLURM's requeue

_NAME = "last-sigterm.ckpt"  # found by Trainer.fit(ckpt_path="last")


class StopSignals:
    """The signals that have come.

    Attributes:
        agreed: Those that all ranks know of.
    """

    def __init__(self) -> None:
        self.agreed = 0
        self._progress = StepContext()
        self._trainer: pl.Trainer | None = None
        self._requeue: Any = None

    def attach(self, trainer: pl.Trainer, progress: StepContext) -> None:
        """Note signals in `progress` from now on; Lightning registers its handlers after this."""
        self.agreed = 0
        self._progress = progress
        if self._trainer is None:
            self._requeue = _compat.requeue_handler(trainer)
        self._trainer = trainer
        _compat.handle_signals(trainer, self._on_stop, self._on_requeue)

    @property
    def stops_together(self) -> bool:
        """Whether all ranks are about to stop at the same place."""
        return bool(self.agreed & STOP)

    def agree(self, signals: int) -> None:
        """Take over what all ranks have received; Lightning then stops at the batch's end."""
        self.agreed |= signals
        if self._trainer is not None and self.agreed & STOP:
            _compat.stop_at_the_end_of_the_batch(self._trainer)

    def requeue(self) -> None:
        """Save and queue the job again, if SLURM has asked for it; on all ranks."""
        if self.agreed & REQUEUE:
            self.agreed &= ~REQUEUE
            self._progress.signals &= ~REQUEUE
            self._requeue(0, None)

    def save(self) -> None:
        """Save before a stop, where the user has a ModelCheckpoint that did not; on all ranks."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        is_saved = any(_has_last(one, trainer) for one in savers)
        folder = next((one.dirpath for one in savers if one.dirpath), None)
        if trainer.fast_dev_run or trainer.sanity_checking or is_saved or folder is None:  # type: ignore[attr-defined]
            return
        path = str(Path(folder) / _NAME) if "://" not in str(folder) else f"{folder}/{_NAME}"
        trainer.save_checkpoint(path, weights_only=False)
        log.info('Saved %s. trainer.fit(ckpt_path="last") goes on from there.', path)

    def _on_stop(self, signum: int, frame: Any) -> None:
        is_first = not self._progress.signals & STOP
        self._progress.signals |= STOP
        launcher = self._trainer.strategy.launcher if self._trainer is not None else None
        if is_first and launcher is not None:
            launcher.kill(signum)  # the processes that this one has started

    def _on_requeue(self, signum: int, frame: Any) -> None:
        self._progress.signals |= REQUEUE


def keep_last(trainer: pl.Trainer | None) -> None:
    """Let the last checkpoints be: the one that was to replace them has not been written."""
    for one in trainer.checkpoint_callbacks if trainer is not None else ():
        if isinstance(one, ModelCheckpoint):
            one.save_last = None


def _has_last(saver: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether `ckpt_path="last"` would find a checkpoint of this step, with which to go on."""
    is_new = _compat.last_saved_step(saver) == trainer.global_step
    return is_new and bool(saver.last_model_path) and not saver.save_weights_only
