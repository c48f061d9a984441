"""Processes that run one draw each, and are ended when a setting takes too long."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import torch

from tests.differential.program import SETTINGS, Draw, Setting
from tests.differential.run import Finding, Kind, run_draw

Task = tuple[Draw, Setting | None]
"""A draw, and the one setting to run it under; None for all of its own."""

FORK = mp.get_context("fork")


def run_tasks(tasks: Iterable[Task], num_processes: int, limit_s: float) -> Iterator[list[Finding]]:
    """Yield the findings of each task, in the order in which they come.

    So many processes at a time; `limit_s` is the longest time for one setting of a draw.
    """
    left = list(tasks)
    running: list[_Worker] = []
    try:
        while left or running:
            while left and len(running) < num_processes:
                running.append(_Worker(left.pop(0)))
            wait([worker.pipe for worker in running], timeout=1.0)
            for worker in list(running):
                if (findings := worker.look(limit_s)) is not None:
                    running.remove(worker)
                    worker.end()
                    yield findings
    finally:
        for worker in running:
            worker.end()


class _Worker:
    """One process, leader of a group of its own."""

    def __init__(self, task: Task) -> None:
        self.draw, self.setting = task[0], task[1] or next(iter(SETTINGS.values()))
        self.start_s = time.monotonic()  # of the setting
        self.pipe, other = FORK.Pipe()
        self.process = FORK.Process(target=_work, args=(other, task))
        self.process.start()
        other.close()

    def look(self, limit_s: float) -> list[Finding] | None:
        """Return the findings of the task, if it is over."""
        try:
            while self.pipe.poll():
                received = self.pipe.recv()
                if isinstance(received, list):
                    return received
                self.setting, self.start_s = SETTINGS[received], time.monotonic()
        except EOFError:
            return self._lost("error", "the process has ended")
        if time.monotonic() - self.start_s > limit_s:
            return self._lost("wait", f"no end after {limit_s:.0f} s")
        return None

    def _lost(self, kind: Kind, text: str) -> list[Finding]:
        return [Finding(self.draw, self.setting, kind, text)]

    def end(self) -> None:
        """End the process and all that it has started."""
        with suppress(ProcessLookupError):  # it has ended, or does not lead a group yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _work(pipe: Connection, task: Task) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    pipe.send(run_draw(*task, pipe.send))
