"""Long-lived processes that run draws, each ended when it waits for too long."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.differential.program import SETTINGS, Draw, Setting
from tests.differential.run import Finding, run_draw, run_setting

Task = tuple[Draw, Setting | None]
"""A draw, and the one setting to run it under; None for all of its own."""


class Workers:
    """So many processes at a time; `limit_s` is the longest time for one setting of a draw.

    Forked processes start at once, with what this process has imported.
    """

    def __init__(self, num_processes: int, limit_s: float, start_method: str = "spawn") -> None:
        self.num_processes, self.limit_s, self.start_method = num_processes, limit_s, start_method

    def run(self, tasks: Iterable[Task]) -> Iterator[list[Finding]]:
        """Yield the findings of each task, in the order in which they come."""
        waiting = deque(tasks)
        number = min(self.num_processes, len(waiting))
        workers = [_Worker(mp.get_context(self.start_method)) for _ in range(number)]
        try:
            while waiting or any(worker.task for worker in workers):
                for worker in workers:
                    if worker.task is None and waiting:
                        worker.begin(waiting.popleft())
                wait([worker.pipe for worker in workers if worker.task], timeout=1.0)
                for worker in workers:
                    findings = worker.look(self.limit_s) if worker.task else None
                    if findings is not None:
                        worker.task = None
                        yield findings
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """One process, leader of a group of its own; another one when it has ended."""

    def __init__(self, context: Any) -> None:
        self.context, self.process = context, None
        self.task: Task | None = None

    def begin(self, task: Task) -> None:
        if self.process is None:
            self.pipe, other = self.context.Pipe()
            self.process = self.context.Process(target=_work, args=(other,))
            self.process.start()
            other.close()
        self.task, self.setting = task, next(iter(SETTINGS.values()))
        self.start_s: float | None = None  # of a setting; a process takes seconds to start
        self.pipe.send(task)

    def look(self, limit_s: float) -> list[Finding] | None:
        """Return the findings of the task, if it is over."""
        try:
            while self.pipe.poll():
                told = self.pipe.recv()
                if isinstance(told, list):
                    return told
                self.setting, self.start_s = SETTINGS[told], time.monotonic()
        except EOFError:
            return self._lost("error", "the process has ended")
        if self.start_s is not None and time.monotonic() - self.start_s > limit_s:
            return self._lost("wait", f"no end after {limit_s:.0f} s")
        return None

    def end(self) -> None:
        """End the process and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):  # it does not lead a group yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
            self.process = None

    def _lost(self, kind: Any, text: str) -> list[Finding]:
        self.end()
        return [Finding(self.task[0], self.task[1] or self.setting, kind, text)]


def _work(pipe: Connection) -> None:
    """Run tasks until the other side is gone."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    while True:
        try:
            draw, setting = pipe.recv()
        except EOFError:
            return
        if setting is None:
            pipe.send(run_draw(draw, pipe.send))
        else:
            pipe.send(setting.name)
            pipe.send([run_setting(draw, setting)])
