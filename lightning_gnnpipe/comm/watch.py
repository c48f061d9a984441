"""Ends all ranks soon after one has failed, each with the first cause.

A rank that fails writes the cause into the rendezvous store. A thread of every other rank reads it
there and breaks this rank's process groups: only so does a wait in C++ end, which then raises the
cause. A rank that is killed writes nothing. Its connections close, or waits reach their timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from lightning_gnnpipe._compat_torch import break_group, clone_store
from lightning_gnnpipe.errors import PeerError

T = TypeVar("T")

_TICK_S = 0.25
_LISTEN_S = 2.0
_MAX_CAUSE = 4000


class Watch:
    """Runs a thread that waits for the news that another rank has failed."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._prefix = ""
        self._groups: Sequence[ProcessGroup] = ()
        self._stopped = threading.Event()
        self._reading = threading.Lock()
        self._cause: str | None = None

    def start(self, groups: Sequence[ProcessGroup]) -> None:
        """Watch from now on; a failure breaks `groups`."""
        self.stop()
        self._store = self._store or clone_store()
        run = self._store.add(f"gnnpipe/runs/{self._rank}", 1)  # equal on all ranks
        self._prefix, self._groups = f"gnnpipe/{run}/", groups
        self._stopped, self._cause = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="gnnpipe-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
        self._groups = ()  # torch.distributed owns them, and ends their threads

    def check(self) -> None:
        """Raise the cause if this rank has heard that another one failed."""
        if self._cause is not None:
            raise PeerError(self._cause) from None  # not as a fault of gloo

    def read(self) -> None:
        """Read the cause, if there is one, and say that this rank has."""
        with self._reading:  # else the thread and the caller would both count this rank
            if self._cause is None and self._prefix:
                self._cause = self._ask(self._look)
                if self._cause is not None:
                    self._ask(lambda: self._store.add(f"{self._prefix}heard", 1))

    def fail(self, cause: str) -> str | None:
        """Publish why this rank ends, unless a rank did before, and break its groups.

        Returns the first cause; None if this rank does not watch. Waits until all ranks have read
        it, at most 2 s: the store ends with the rank that hosts it.
        """
        if self._thread is None:
            return None
        groups = self._groups
        self.stop()
        cause = cause[:_MAX_CAUSE]
        self._ask(lambda: self._store.compare_set(f"{self._prefix}cause", "", cause))
        self.read()
        deadline = time.monotonic() + _LISTEN_S
        while time.monotonic() < deadline and (self._ask(self._count_heard) or 0) < self._size:
            time.sleep(_TICK_S / 5)
        self._break(groups)
        return self._cause

    def _run(self) -> None:
        while not self._stopped.wait(_TICK_S):
            self.read()
            if self._cause is not None:
                self._break(self._groups)
                return

    def _break(self, groups: Sequence[ProcessGroup]) -> None:
        for group in groups:
            break_group(group)

    def _look(self) -> str | None:
        key = f"{self._prefix}cause"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _count_heard(self) -> int:
        return int(self._store.add(f"{self._prefix}heard", 0))

    def _ask(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the store; None once the store is gone with the rank that hosts it."""
        try:
            return work()
        except RuntimeError:
            return None
