"""Starts ranks by fork or spawn, and brings back what they return; stops them together."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_gnnpipe.errors import PeerError
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.user_code import shorten

_STOPPED = "stopped by SIGTERM"
_CLOSED = re.compile(r"(closed|reset) by peer", re.IGNORECASE)


class WorkerLauncher(_compat.MultiProcessingLauncher):
    """Lightning's launcher with six additions.

    - Workers get the state of `random` of this process, which Python seeds anew after a fork.
    - Outputs of `predict` and attributes of callbacks come back from worker 0.
    - Forks compute with one thread each.
    - A worker that stops on SIGTERM runs the callbacks' hooks and reports; Lightning would wait
      forever for its result.
    - This process passes SIGTERM on to its workers.
    - If the system kills a worker, that is the cause, also if another one reports first: a process
      with a GPU closes its connections long before it has ended.
    """

    is_fork: bool
    random_state: Mapping[str, Any]
    callbacks: Sequence[pl.Callback]  # without the ones that the module adds in the workers
    end_worker: Callable[[BaseException], None]  # publishes the error that ends a worker

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.random_state = random_state(torch.device("cpu"))
        self.callbacks = [] if trainer is None else list(trainer.callbacks)
        before = None
        if threading.current_thread() is threading.main_thread():  # which alone handles signals
            before = signal.signal(signal.SIGTERM, lambda signum, _: self.kill(signum))
        try:
            found = super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessRaisedException as error:
            self._raise_of_killed(error)
            raise
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        return found if trainer is None else self.unpack(trainer, found)

    def _raise_of_killed(self, error: ProcessRaisedException) -> None:
        """Raise that a worker was killed, if `error` only says that its connection was closed.

        Where a worker did not answer, torch kills it later, and the signal is not the cause.
        """
        text = str(error)
        if f"{PeerError.__name__}:" not in text or not _CLOSED.search(text):
            return
        names = {one.value: one.name for one in signal.Signals}
        for rank, one in enumerate(self.procs):
            code = one.exitcode or 0
            if code < 0 and -code != signal.SIGTERM:  # which torch sends to the ones that are left
                name = names.get(-code, str(-code))
                text = f"process {rank} terminated with signal {name}"
                raise ProcessExitedException(text, rank, one.pid or 0, code, name) from error

    def run_worker(self, index: int, trainer: Any, results: Any, work: Callable[[], Any]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.is_fork:  # in which OpenMP would wait for threads that were not forked
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        set_random_state(self.random_state, torch.device("cpu"))
        trainer.strategy.forget_launcher()
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

    def pack(self, trainer: pl.Trainer, results: Any) -> str:
        """Write `results` and the attributes of callbacks to a file; return its path.

        A queue would wait for its reader. Attributes that cannot be pickled are left out.
        """
        names = {id(one): name for name, one in self._known(trainer).items()}
        states: list[dict[str, bytes]] = [{} for _ in self.callbacks]
        for callback, state in zip(self.callbacks, states, strict=True):
            for name, value in vars(callback).items():
                with suppress(Exception):  # such as a file or a lambda
                    state[name] = _dumps(value, names)
        number, path = tempfile.mkstemp()
        with os.fdopen(number, "wb") as file:
            pickle.dump((_dumps(results, names), states), file)
        return path

    def unpack(self, trainer: pl.Trainer, path: str) -> Any:
        """Read the file of `pack` and remove it; set the attributes and return the results."""
        with open(path, "rb") as file:
            results, states = pickle.load(file)
        os.remove(path)
        known = self._known(trainer)
        for callback, state in zip(self.callbacks, states, strict=True):
            for name, value in state.items():
                with suppress(Exception):  # made in the worker, and unknown here
                    vars(callback)[name] = _loads(value, known)
        return _loads(results, known)

    def check_result(self, result: Any) -> None:
        if result == _STOPPED:
            raise SIGTERMException

    def _known(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return objects that both processes have, by name; they are not copied."""
        module = trainer.lightning_module
        return {
            "trainer": trainer,
            "strategy": trainer.strategy,
            **{f"callback {i}": one for i, one in enumerate(self.callbacks)},
            **{f"logger {i}": one for i, one in enumerate(trainer.loggers)},
            **{f"module {name}": one for name, one in module.named_modules()},
            **{f"parameter {name}": one for name, one in module.named_parameters()},
        }


class _Pickler(pickle.Pickler):
    names: Mapping[int, str]

    def persistent_id(self, value: Any) -> str | None:
        return self.names.get(id(value))


class _Unpickler(pickle.Unpickler):
    known: Mapping[str, Any]

    def persistent_load(self, name: str) -> Any:
        return self.known[name]


def _dumps(value: Any, names: Mapping[int, str]) -> bytes:
    file = BytesIO()
    pickler = _Pickler(file)
    pickler.names = names
    pickler.dump(move_data_to_device(value, "cpu"))
    return file.getvalue()


def _loads(text: bytes, known: Mapping[str, Any]) -> Any:
    unpickler = _Unpickler(BytesIO(text))
    unpickler.known = known
    return unpickler.load()


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
