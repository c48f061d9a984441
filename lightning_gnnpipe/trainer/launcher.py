"""Starts ranks by fork or spawn with this process's random state, and stops them together."""

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
    """Lightning's launcher with three additions.

    - Workers get the state of `random` of this process, which Python seeds anew after a fork.
    - A worker that stops on SIGTERM runs the callbacks' hooks and reports; Lightning would wait
      forever for its result.
    - This process passes SIGTERM on to its workers.
    """

    random_state: dict[str, Any] | None = None
    end_worker: Callable[[BaseException], None]  # publishes the error that ends a worker

    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.random_state = random_state(torch.device("cpu"))
        if threading.current_thread() is not threading.main_thread():  # cannot handle signals
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
            self.end_worker(error)
            shorten(error)
            raise

    def check_result(self, result: Any) -> None:
        if result == _STOPPED:
            raise SIGTERMException


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all random streams, including a GPU `device`."""
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
    """Restore the states of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    algorithm, keys, position, has_gauss = state["numpy"]
    keys = keys.numpy().astype("uint32")
    np.random.set_state((algorithm, keys, position, has_gauss, state["numpy_gauss"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
