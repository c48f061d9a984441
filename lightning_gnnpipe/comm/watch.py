"""A thread on each rank that ends waits which cannot succeed.

A rank waits in C++, where neither another rank's error nor a signal reaches it. The thread polls
the rendezvous store and the received signals. It breaks this rank's process groups if

- another rank has failed;
- all ranks wait, not all for the same call, and none has moved for 10 s;
- this rank was asked to stop, and its wait goes on.

Collective calls of user code count as waits: the thread finds them on the main thread's stack.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from lightning_gnnpipe._compat_torch import break_groups, clone_store, end_now, place_in_torch
from lightning_gnnpipe.errors import PeerError, UnsupportedError

T = TypeVar("T")

log = logging.getLogger(__name__)

_TICK_S = 0.25
_SHORT_S = 1.0  # shorter waits are not published
_STILL_S = 10.0  # without progress of any rank: a deadlock
_SLOW_BYTES_PER_S = 1e7  # slowest network; messages in flight extend _STILL_S
_PATIENCE_S = {signal.SIGTERM: 15.0, signal.SIGINT: 2.0}  # time to finish the batch
_LAST_S = 10.0  # then a rank that has not ended by itself is killed
_LISTEN_S = 2.0
_MAX_CAUSE = 4000


class _Wait(NamedTuple):
    what: str
    num_bytes: int
    since: float


class Watch:
    """Runs a thread that watches this rank's waits for other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._reset("", lambda: False)

    def _reset(self, prefix: str, is_stopping: Callable[[], bool]) -> None:
        self._prefix, self._is_stopping = prefix, is_stopping
        self._stopped = threading.Event()
        self._wait: _Wait | None = None
        self._count = 0  # waits so far
        self._sampled: tuple[int, _Wait] | None = None
        self._looked: list[Any] | None = None  # the waits of all ranks at the last check
        self._told_at = 0.0  # when this rank published its wait; 0.0: not published
        self._signals: dict[int, float] = {}
        self._pipe: tuple[int, int] | None = None
        self._verdict: Exception | None = None
        self._since = 0.0  # time of the verdict
        self._is_told = self._is_ending = self._is_broken = self._has_heard = False
        self._has_store = True

    def start(self, is_stopping: Callable[[], bool]) -> None:
        """Watch the waits of this thread. `is_stopping`: whether this rank was asked to stop."""
        self.stop()
        self._store = self._store or clone_store()
        run = self._store.add(f"gnnpipe/runs/{self._rank}", 1)  # equal on all ranks
        self._reset(f"gnnpipe/{run}/", is_stopping)
        self._waits = [f"{self._prefix}wait/{rank}" for rank in range(self._size)]
        self._store.set(self._waits[self._rank], "")
        self._listen()
        work = threading.Thread(
            target=self._run, args=(threading.get_ident(),), name="gnnpipe-watch", daemon=True
        )
        self._thread = work
        work.start()

    def stop(self) -> None:
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        self._thread = None
        if self._pipe is not None:
            own, before = self._pipe[1], self._before
            found = signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            if found != own:  # another library has replaced ours: keep it
                signal.set_wakeup_fd(found, warn_on_full_buffer=False)
            for end in self._pipe:
                os.close(end)

    @contextmanager
    def waiting(self, what: str, num_bytes: int = 0) -> Iterator[None]:
        """Mark the block as a wait; `what` follows "wants to". Raise if there is a verdict."""
        if self._verdict is not None:
            raise self._error()
        self._count += 1
        self._wait = _Wait(what, num_bytes, time.monotonic())
        try:
            yield
        finally:
            self._wait = None

    def cause(self) -> Exception | None:
        """Return why a wait failed; None if no rank published a cause (a killed rank cannot)."""
        if self._thread is not None and self._verdict is None:
            self._verdict = self._asking(self._read_cause)
        return None if self._verdict is None else self._error()

    def fail(self, text: str, *, is_cause: bool) -> str:
        """Publish why this rank ends. Return the cause if it lies with other ranks, else "".

        With `is_cause`, `text` is the root cause: wait up to 2 s until all ranks have read it.
        """
        self._is_ending = True
        if self._thread is None:
            return ""
        if not is_cause:
            self.cause()
        self._tell(text, by=self._rank if is_cause else None)
        deadline = time.monotonic() + (_LISTEN_S if is_cause else 0.0)
        heard = f"{self._prefix}heard"
        while time.monotonic() < deadline:
            if (self._asking(lambda: self._store.add(heard, 0)) or self._size) >= self._size:
                break
            time.sleep(_TICK_S / 5)
        return "" if self._verdict is None else str(self._verdict)

    def _run(self, main: int) -> None:
        while not self._stopped.wait(_TICK_S):
            self._note_signals()
            wait = self._find_wait(main)
            if self._verdict is None and not self._is_ending:
                self._verdict = self._asking(self._read_cause) or self._judge(wait)
                self._since = time.monotonic()
            if self._verdict is not None and not self._is_ending:
                self._end(wait)

    def _judge(self, wait: _Wait | None) -> Exception | None:
        """Publish and return the error that ends this wait; None to keep waiting."""
        waited = 0.0 if wait is None else time.monotonic() - wait.since
        if wait is None or waited < _SHORT_S:
            if self._told_at:
                self._asking(lambda: self._store.set(self._waits[self._rank], ""))
                self._told_at = 0.0
            return None
        for number, patience in _PATIENCE_S.items():
            # The handler of a signal from before this wait has run: ask whether it stops this rank.
            came = self._signals.get(number)
            is_ours = came is not None and (wait.since <= came or self._is_stopping())
            if came is not None and is_ours and time.monotonic() - max(came, wait.since) > patience:
                name = signal.Signals(number).name
                error = PeerError(
                    f"Rank {self._rank} received {name}, but could not finish its batch: other "
                    f"ranks did not answer ({wait.what})."
                )
                self._tell(str(error), by=None)
                return error
        if time.monotonic() - self._told_at < _SHORT_S:
            return None
        self._told_at = time.monotonic()
        looked = self._asking(lambda: self._compare([wait.what, waited, wait.num_bytes]))
        if looked is None or None in looked:
            self._looked = None
            return None
        least = _STILL_S + max(num_bytes for _, _, num_bytes in looked) / _SLOW_BYTES_PER_S
        whats = [what for what, _, _ in looked]
        before, self._looked = self._looked, looked
        # A rank that has not published again may have moved on: its record is old.
        have_all_looked = before is not None and all(
            now[0] == then[0] and now[1] > then[1] for now, then in zip(looked, before, strict=True)
        )
        if (
            not have_all_looked
            or min(waited for _, waited, _ in looked) < least
            or len({_kind(one) for one in whats}) == 1
        ):
            return None
        different = differ(whats)
        self._tell(str(different), by=None)
        return different

    def _end(self, wait: _Wait | None) -> None:
        """Make this rank fail at its current or next wait; kill it if it does not within 10 s."""
        if wait is not None and not self._is_broken:
            self._is_broken = True
            break_groups()
        if not self._is_told and time.monotonic() - self._since > _LAST_S:
            log.error("Rank %d did not stop by itself and is killed. %s", self._rank, self._verdict)
            end_now(1)

    def _compare(self, own: list[Any]) -> list[Any] | None:
        """Publish this rank's wait; return the wait of each rank, None for a rank without one."""
        self._store.set(self._waits[self._rank], json.dumps(own))
        if not self._store.check(self._waits):
            return None
        return [json.loads(one or "null") for one in self._store.multi_get(self._waits)]

    def _tell(self, text: str, by: int | None) -> None:
        """Publish the cause if there is none yet; `by` is the failed rank, None for all ranks."""
        cause = json.dumps([by, text[:_MAX_CAUSE]])
        self._asking(lambda: self._store.compare_set(f"{self._prefix}cause", "", cause))
        self._asking(self._hear)

    def _asking(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the store; None once the store is gone with the rank that hosts it."""
        if not self._has_store:
            return None
        try:
            return work()
        except RuntimeError:
            self._has_store = False
            return None

    def _read_cause(self) -> Exception | None:
        cause = f"{self._prefix}cause"
        if not self._store.check([cause]):
            return None
        self._hear()
        rank, text = json.loads(self._store.get(cause))
        if rank is None:
            return PeerError(f"All ranks stop: {text}")
        return PeerError(f"Rank {rank} failed: {text}")

    def _hear(self) -> None:
        """Count this rank among the ranks that know the cause."""
        if not self._has_heard:
            self._has_heard = True
            self._store.add(f"{self._prefix}heard", 1)

    def _find_wait(self, main: int) -> _Wait | None:
        """Return this rank's wait in the package or, found on the stack, in user code."""
        if self._wait is not None:
            return self._wait
        place, count = place_in_torch(main), self._count
        if place is None:
            self._sampled = None
            return None
        if self._sampled is None or (self._sampled[0], self._sampled[1].what) != (count, place):
            self._sampled = count, _Wait(place, 0, time.monotonic())
        return self._sampled[1]

    def _error(self) -> Exception:
        """Return a copy of the verdict: an error raised twice would show both tracebacks."""
        assert self._verdict is not None
        self._is_told = True
        return type(self._verdict)(str(self._verdict))

    def _listen(self) -> None:
        """Record signals when they arrive, through a pipe, while Python cannot run handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def _note_signals(self) -> None:
        if self._pipe is None:
            return
        with suppress(BlockingIOError):
            numbers = os.read(self._pipe[0], 1024)
            for number in numbers:
                self._signals.setdefault(number, time.monotonic())
            if self._before >= 0:
                os.write(self._before, numbers)


def differ(whats: Sequence[str], ranks: Sequence[int] | None = None) -> UnsupportedError:
    """Return the error for ranks that do different things; `whats` follow "wants to"."""
    groups: dict[str, list[int]] = {}
    for rank, what in zip(range(len(whats)) if ranks is None else ranks, whats, strict=True):
        groups.setdefault(what, []).append(rank)
    return UnsupportedError(
        expected="all ranks to make the same calls",
        found="; ".join(_told(what, ranks) for what, ranks in groups.items()),
        remedy="Call the pipelined module, trainer.save_checkpoint and all functions that "
        "communicate on every rank, not under `if self.global_rank == 0`. Every rank must take "
        "the same branches in each hook.",
    )


def _told(what: str, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} wants to {what}"
    return f"ranks {', '.join(map(str, ranks))} want to {what}"


def _kind(what: str) -> str:
    """Return `what` without the place in user code."""
    return what.partition(" (")[0]
