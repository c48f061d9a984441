"""Starts ranks by fork or spawn, and brings back what they return; stops them together.

Overrides private methods of Lightning's launcher; `tests/test_compat.py` lists them.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies import launchers
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_gnnpipe.errors import PeerError
from lightning_gnnpipe.trainer.random_state import random_state, set_random_state
from lightning_gnnpipe.user_code import shorten

_STOPPED = "stopped by SIGTERM"
_CLOSED = re.compile(r"(closed|reset) by peer", re.IGNORECASE)


class WorkerLauncher(launchers._MultiProcessingLauncher):
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
        return found if trainer is None else self._unpack(trainer, found)

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

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.is_fork:  # in which OpenMP would wait for threads that were not forked
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        set_random_state(self.random_state, torch.device("cpu"))
        trainer.strategy._launcher = None  # so that Lightning lets it return outputs
        try:
            super()._wrapping_function(
                process_idx, trainer, function, args, kwargs, return_queue, global_states
            )
        except SIGTERMException as stop:
            call._interrupt(trainer, stop)
            trainer._teardown()
            if process_idx == 0:
                return_queue.put(_STOPPED)
        except BaseException as error:
            self.end_worker(error)
            shorten(error)
            raise

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        path = self._pack(trainer, results) if trainer.local_rank == 0 else None
        return super()._collect_rank_zero_results(trainer, path)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if worker_output == _STOPPED:
            raise SIGTERMException
        super()._recover_results_in_main_process(worker_output, trainer)

    def _pack(self, trainer: pl.Trainer, results: Any) -> str:
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

    def _unpack(self, trainer: pl.Trainer, path: str) -> Any:
        """Read the file of `_pack` and remove it; set the attributes and return the results."""
        with open(path, "rb") as file:
            results, states = pickle.load(file)
        os.remove(path)
        known = self._known(trainer)
        for callback, state in zip(self.callbacks, states, strict=True):
            for name, value in state.items():
                with suppress(Exception):  # made in the worker, and unknown here
                    vars(callback)[name] = _loads(value, known)
        return _loads(results, known)

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
