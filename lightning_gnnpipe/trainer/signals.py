"""Signals to stop or requeue a run: recorded on arrival, handled on all ranks together.

Lightning's own handlers communicate at once, while messages of the pipeline are in flight, so ranks
could wait for each other forever. Here a handler sets a flag. All ranks see it at the next
pipelined forward, finish the batch, save, and end.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gnnpipe.steps import SignalBits
from lightning_gnnpipe.trainer import _compat

log = logging.getLogger(__name__)

STOP = 1  # SIGTERM
REQUEUE = 2  # the signal of SLURM's requeue

_NAME = "last-sigterm.ckpt"  # found by Trainer.fit(ckpt_path="last")


class StopSignals:
    """The signals of a run."""

    def __init__(self) -> None:
        self._bits = SignalBits()
        self._trainer: pl.Trainer | None = None
        self._requeue: Any = None  # Lightning's handler

    def attach(self, trainer: pl.Trainer, bits: SignalBits) -> None:
        """Record signals in `bits` from now on; Lightning registers its handlers after this."""
        before = _compat.handle_signals(trainer, self._on_stop, self._on_requeue)
        if self._trainer is None:
            self._requeue = before
        self._bits, self._trainer = bits, trainer

    @property
    def received(self) -> int:
        """Bits, on this rank."""
        return self._bits.received

    @property
    def stops_together(self) -> bool:
        """Whether all ranks are about to stop at the same place."""
        return bool(self._bits.agreed & STOP)

    def obey(self) -> None:
        """Let Lightning stop after the batch if any rank has received SIGTERM."""
        if self._trainer is not None and self.stops_together:
            _compat.stop_at_the_end_of_the_batch(self._trainer)

    def requeue(self) -> None:
        """Save and requeue the SLURM job if it was requested; on all ranks."""
        if self._bits.agreed & REQUEUE:
            self._bits.agreed &= ~REQUEUE
            self._bits.received &= ~REQUEUE
            self._requeue(0, None)

    def save(self) -> None:
        """Save before a stop, unless a ModelCheckpoint just has; on all ranks."""
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
        is_first = not self._bits.received & STOP
        self._bits.received |= STOP
        launcher = self._trainer.strategy.launcher if self._trainer is not None else None
        if is_first and launcher is not None:
            launcher.kill(signum)  # the workers of this process

    def _on_requeue(self, signum: int, frame: Any) -> None:
        self._bits.received |= REQUEUE


def keep_last(trainer: pl.Trainer | None) -> None:
    """Keep the last checkpoints, whose replacement was not written."""
    for one in trainer.checkpoint_callbacks if trainer is not None else ():
        if isinstance(one, ModelCheckpoint):
            one.save_last = None


def _has_last(saver: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether `ckpt_path="last"` would find a resumable checkpoint of this step."""
    is_new = _compat.last_saved_step(saver) == trainer.global_step
    return is_new and bool(saver.last_model_path) and not saver.save_weights_only
