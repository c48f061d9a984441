"""Processes started by fork or spawn: with this one's random numbers, and stopped together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnnpipe import _compat
from lightning_gnnpipe.randomness import random_state
from lightning_gnnpipe.user_code import shorten

_STOPPED = "stopped by SIGTERM"


class WorkerLauncher(_compat.MultiProcessingLauncher):
    """Lightning's launcher, and what it leaves out.

    - Python seeds `random` anew in a process that it forks: workers draw what this process would.
    - A worker that stops on SIGTERM tells its callbacks, as the Trainer does where it starts no
      workers; Lightning would wait for its result for ever.
    - SIGTERM to this process alone is passed on to the workers.
    """

    random_state: dict[str, Any] | None = None

    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.random_state = random_state(torch.device("cpu"))
        if threading.current_thread() is not threading.main_thread():  # may not handle signals
            return super().launch(function, *args, **kwargs)
        before = signal.signal(signal.SIGTERM, lambda signum, _: self.kill(signum))
        try:
            return super().launch(function, *args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, before)

    def run_worker(self, index: int, trainer: Any, results: Any, work: Callable[[], Any]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            work()
        except SIGTERMException as stop:
            _compat.interrupt(trainer, stop)
            _compat.teardown(trainer)
            if index == 0:
                results.put(_STOPPED)
        except BaseException as error:
            trainer.strategy.end_with(error)
            shorten(error)
            trainer.strategy.abandon()
            raise

    def check_result(self, result: Any) -> None:
        if result == _STOPPED:
            raise SIGTERMException
