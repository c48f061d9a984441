"""Programs that lie in files of their own: their modules, and runs of them."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@contextmanager
def modules_of(folder: Path, names: Sequence[str]) -> Iterator[dict[str, ModuleType]]:
    """Import the modules of `folder`; their names are common ones, so they are forgotten then."""
    path, before = list(sys.path), {name: sys.modules.pop(name, None) for name in names}
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parents[1])]
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path[:] = path
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def fixture_of(folder: Path, *names: str, scope: Any = "function") -> Any:
    """Return a fixture of the modules of a folder by name; of one, the module itself."""

    @pytest.fixture(scope=scope)
    def modules() -> Iterator[Any]:
        with modules_of(folder, names) as found:
            yield found if len(names) > 1 else found[names[0]]

    return modules


class Script:
    """A program that runs in a session of its own, and what it prints goes to a file."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self.output = pid, output
        self.returncode: int | None = None

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, word: str, seconds: float = 60) -> None:
        """Return when it has printed `word` or has ended."""
        deadline = time.monotonic() + seconds
        while word not in self.text and self._runs() and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self, seconds: float) -> float:
        """Wait for its end, and return how long that took; after `seconds` kill its session."""
        started = time.monotonic()
        while self._runs():
            if time.monotonic() - started > seconds:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"It still ran after {seconds} s:\n{self.text[-3000:]}")
            time.sleep(0.02)
        return time.monotonic() - started

    def _runs(self) -> bool:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode is None


def start_script(
    path: Path, *arguments: object, is_new: bool, output: Path | None = None
) -> Script:
    """Run a program in a new interpreter, which costs seconds of imports, or in a fork of this one.

    The fork has imported what this process has. It ends as a program does, but for what Python
    does when it takes its modules down. What it prints goes to `output`, a file next to it.
    """
    argv, output = [str(path), *map(str, arguments)], output or path.with_name("output.txt")
    with output.open("wb", buffering=0) as file:
        if is_new:
            process = subprocess.Popen(
                [sys.executable, *argv],
                stdout=file,
                stderr=file,
                env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            process.returncode = 0  # it is `Script` that waits for it
            return Script(process.pid, output)
        pid = os.fork()
        if not pid:
            _run_forked(argv, file.fileno())
    return Script(pid, output)


def run_script(
    folder: Path, program: str, *arguments: object, is_new: bool = False, fails: bool = False
) -> Script:
    """Write a program to a new file of `folder`, and return it when it has ended, as expected."""
    path = folder / "train.py"
    path.write_text(program)
    script = start_script(path, *arguments, is_new=is_new)
    script.end(200)
    assert (script.returncode != 0) == fails, script.text[-3000:]
    return script


def is_alive(pid: int, seconds: float = 15) -> bool:
    """Whether a process is still there after so long; one that nobody has waited for is not."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)


def _run_forked(argv: list[str], output: int) -> NoReturn:
    """Undo what pytest has changed in this process, run the program, and never return."""
    status = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
        )
        logging.root.handlers.clear()  # pytest's, which would swallow what a program prints
        for name in logging.root.manager.loggerDict:
            for handler in logging.getLogger(name).handlers:
                if type(handler) is logging.StreamHandler:
                    handler.setStream(sys.stderr)
        if "pytorch_lightning" in sys.modules:  # it has taken over what Lightning logs
            logging.getLogger("pytorch_lightning").addHandler(logging.StreamHandler(sys.stderr))
        for name in ("lightning.pytorch", "lightning.fabric"):  # examples have made them silent
            logging.getLogger(name).setLevel(logging.INFO)
        warnings.resetwarnings()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")  # of processes it starts
        atexit._clear()
        sys.argv = argv
        try:
            runpy.run_path(argv[0], run_name="__main__")
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if status and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        except BaseException as error:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename != argv[0]:  # from here to there
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
