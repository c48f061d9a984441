"""Starts ranks by fork or spawn, with this process's random numbers, and stops them together."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnnpipe.trainer import _compat
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


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all streams, with that of `device` if it is a GPU."""
    algorithm, keys, position, has_gauss, cached = cast(Any, np.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(algorithm), torch.from_numpy(keys.astype("int64")), position, has_gauss),
        "numpy_gauss": float(cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put all streams into the states that `random_state` has returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    algorithm, keys, position, has_gauss = state["numpy"]
    keys = keys.numpy().astype("uint32")
    np.random.set_state((algorithm, keys, position, has_gauss, state["numpy_gauss"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
