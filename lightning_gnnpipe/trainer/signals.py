"""Signals to stop or requeue a run: recorded on arrival, handled on all ranks together.

Lightning's own handlers communicate at once, while messages of the pipeline are in flight, so ranks
could wait for each other forever. Here a handler sets a flag. All ranks see it at the start of the
next step, or at the end of a validation, and run Lightning's handlers together: they finish the
batch, save, and end.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.trainer import _compat

log = logging.getLogger(__name__)

STOP = 1  # SIGTERM
REQUEUE = 2  # the signal of SLURM's requeue
END = 4  # no signal: trainer.should_stop, maybe set on this rank alone

_NAME = "last-sigterm.ckpt"  # found by Trainer.fit(ckpt_path="last")


class StopSignals:
    """The signals of a run."""

    def __init__(self) -> None:
        self.received = 0  # bits of signals, by this rank
        self._agreed = 0  # by any rank, before the last step
        self._trainer: pl.Trainer | None = None
        self._notes = {bit: partial(self._note, bit) for bit in (STOP, REQUEUE)}
        self._lightnings: dict[int, partial[None]] = {}

    def begin_run(self) -> None:
        """Forget the signals of the last run."""
        self.received = self._agreed = 0

    def own(self, trainer: pl.Trainer) -> int:
        """Return the bits of this rank, to send to all."""
        return self.received | (END if trainer.should_stop else 0)

    def agree(self, ranks: Iterable[int], trainer: pl.Trainer) -> None:
        """Take up the bits of all ranks; say on the first one if only some of them stop."""
        every = list(ranks)
        stopping = [str(rank) for rank, bits in enumerate(every) if bits & END]
        if trainer.is_global_zero and 0 < len(stopping) < len(every):
            log.warning(
                "Rank %s has set trainer.should_stop, so all ranks stop.", ", ".join(stopping)
            )
        for bits in every:
            self._agreed |= bits & ~END
            trainer.should_stop |= bool(bits & END)

    def attach(self, trainer: pl.Trainer) -> None:
        """Record signals once Lightning has set its handlers, until it removes them."""
        self._trainer = trainer
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        numbers: dict[int, Any] = {STOP: signal.SIGTERM}
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            numbers[REQUEUE] = environment.requeue_signal
        if threading.current_thread() is not threading.main_thread():
            return
        for bit, number in numbers.items():
            found: Any = signal.getsignal(number)
            if callable(found) and found is not self._notes[bit]:
                self._lightnings[bit] = partial(found, number)
                signal.signal(number, self._notes[bit])

    @property
    def stops_together(self) -> bool:
        """Whether all ranks are about to stop at the same place."""
        return bool(self._agreed & STOP)

    def obey(self) -> None:
        """Let Lightning stop after the batch if any rank has received SIGTERM."""
        if self._agreed & STOP and STOP in self._lightnings:
            self._lightnings.pop(STOP)(None)

    def requeue(self) -> None:
        """Save and requeue the SLURM job if it was requested; on all ranks."""
        if self._agreed & REQUEUE:
            self._agreed &= ~REQUEUE
            self.received &= ~REQUEUE
            if REQUEUE not in self._lightnings:
                raise ConfigError(
                    expected="SLURM's requeue signal to be handled on every rank",
                    found="a rank without Lightning's handler",
                    remedy="Call trainer.fit in the main thread of every process.",
                )
            self._lightnings[REQUEUE](None)

    def save(self) -> None:
        """Save before a stop, unless a ModelCheckpoint just has; on all ranks."""
        trainer, savers = self._trainer, self._savers()
        if trainer is None or not savers:
            return
        is_saved = any(_has_last(one, trainer) for one in savers)
        folder = next((one.dirpath for one in savers if one.dirpath), None)
        if trainer.fast_dev_run or trainer.sanity_checking or is_saved or folder is None:  # type: ignore[attr-defined]
            return
        path = str(Path(folder) / _NAME) if "://" not in str(folder) else f"{folder}/{_NAME}"
        trainer.save_checkpoint(path, weights_only=False)

    def _savers(self) -> list[ModelCheckpoint]:
        """Return the callbacks that save in fit."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return []
        return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]

    def _note(self, bit: int, signum: int, frame: Any) -> None:
        self.received |= bit


def _has_last(saver: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether `ckpt_path="last"` would find a resumable checkpoint of this step."""
    is_new = _compat.last_saved_step(saver) == trainer.global_step
    return is_new and bool(saver.last_model_path) and not saver.save_weights_only
