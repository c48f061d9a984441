"""A thread of each rank that sees to it that no rank waits in vain.

    rank 0: waits for rank 1   rank 1: fails
    thread: reads the cause  <-- store <--  writes the cause, ends
    thread: breaks the groups
    rank 0: fails, with that cause

A rank waits in C++, where neither another rank's error nor a signal reaches it. The thread looks
at the store by which the ranks have met, and at the signals that have come. It breaks the process
groups of this rank where a wait is in vain:

- another rank has failed;
- all ranks wait, each for something else, and none of them has moved for 10 s;
- this rank has been asked to end, and its wait goes on.

Collective calls of the user's are waits as well: the thread sees where the program is.
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
from lightning_gnnpipe.errors import PeerError, UnsupportedError, explain

T = TypeVar("T")

log = logging.getLogger(__name__)

_TICK_S = 0.25
_SHORT_S = 1.0  # no need to speak of a wait
_STILL_S = 10.0  # of all ranks
_SLOW_BYTES_PER_S = 1e7  # of a network on which messages are on their way for longer
_PATIENCE_S = {signal.SIGTERM: 15.0, signal.SIGINT: 2.0}  # the batch may yet be brought to its end
_LAST_S = 10.0  # after which a rank that does not come to its end by itself is ended
_LISTEN_S = 2.0
_MAX_CAUSE = 4000


class _Wait(NamedTuple):
    what: str
    num_bytes: int
    since: float


class Watch:
    """Watches over what this rank waits for.

    Args:
        rank: This rank.
        size: Ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._reset("", lambda: False)

    def _reset(self, prefix: str, is_stopping: Callable[[], bool]) -> None:
        self._prefix, self._is_stopping = prefix, is_stopping
        self._stopped = threading.Event()
        self._wait: _Wait | None = None
        self._count = 0  # of waits
        self._sampled: tuple[int, _Wait] | None = None
        self._looked: list[Any] | None = None  # what all ranks waited for, at the last look
        self._told_at = 0.0  # when this rank published this wait; 0.0 if it has not
        self._signals: dict[int, float] = {}
        self._pipe: tuple[int, int] | None = None
        self._verdict: Exception | None = None
        self._since = 0.0  # of the verdict
        self._is_told = self._is_ending = self._is_broken = self._has_heard = False
        self._has_store = True

    def start(self, is_stopping: Callable[[], bool]) -> None:
        """Watch the waits of this thread from now on.

        Args:
            is_stopping: Whether this rank has been told to stop.
        """
        self.stop()
        self._store = self._store or clone_store()
        run = self._store.add(f"gnnpipe/runs/{self._rank}", 1)  # the same on all ranks
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
        """Watch no longer."""
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        self._thread = None
        if self._pipe is not None:
            own, before = self._pipe[1], self._before
            found = signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            if found != own:  # somebody else's
                signal.set_wakeup_fd(found, warn_on_full_buffer=False)
            for end in self._pipe:
                os.close(end)

    @contextmanager
    def waiting(self, what: str, num_bytes: int = 0) -> Iterator[None]:
        """Say that the block may wait for other ranks.

        Args:
            what: Follows "wants to".
            num_bytes: That may be on their way.

        Raises:
            PeerError: If another rank has failed.
            UnsupportedError: If the ranks wait for each other.
        """
        if self._verdict is not None:
            raise self._error()
        self._count += 1
        self._wait = _Wait(what, num_bytes, time.monotonic())
        try:
            yield
        finally:
            self._wait = None

    def cause(self) -> Exception | None:
        """Return why a wait has failed; None if no rank has said so: one that was killed cannot."""
        if self._thread is not None and self._verdict is None:
            self._verdict = self._asking(self._read_cause)
        return None if self._verdict is None else self._error()

    def fail(self, text: str, *, is_cause: bool) -> str:
        """Let the other ranks know why this one ends.

        Args:
            text: Why.
            is_cause: Whether it is the cause of all: wait a moment until they know.

        Returns:
            The cause, if another rank or all ranks together have caused the end. Else empty.
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
        """Return the error that ends this wait, after telling all ranks; None to keep waiting."""
        waited = 0.0 if wait is None else time.monotonic() - wait.since
        if wait is None or waited < _SHORT_S:
            if self._told_at:
                self._asking(lambda: self._store.set(self._waits[self._rank], ""))
                self._told_at = 0.0
            return None
        for number, patience in _PATIENCE_S.items():
            # One that has come since would have been noted by this rank, if it was for this rank.
            came = self._signals.get(number)
            is_ours = came is not None and (wait.since <= came or self._is_stopping())
            if came is not None and is_ours and time.monotonic() - max(came, wait.since) > patience:
                name = signal.Signals(number).name
                error = PeerError(
                    f"Rank {self._rank} got {name} and waited in vain to {wait.what}."
                )
                self._tell(str(error), by=None)
                return error
        if time.monotonic() - self._told_at < _SHORT_S:
            return None
        self._told_at = time.monotonic()
        told = self._asking(lambda: self._compare([wait.what, waited, wait.num_bytes]))
        if told is None or None in told:
            self._looked = None
            return None
        least = _STILL_S + max(num_bytes for _, _, num_bytes in told) / _SLOW_BYTES_PER_S
        whats = [what for what, _, _ in told]
        before, self._looked = self._looked, told
        # A rank that has not looked since may have gone on: its record is old.
        have_all_looked = before is not None and all(
            now[0] == then[0] and now[1] > then[1] for now, then in zip(told, before, strict=True)
        )
        if (
            not have_all_looked
            or min(waited for _, waited, _ in told) < least
            or len({_kind(one) for one in whats}) == 1
        ):
            return None
        self._tell(str(differ(whats)), by=None)
        return differ(whats)

    def _end(self, wait: _Wait | None) -> None:
        """Have this rank fail at the wait that it is in, or at its next one."""
        if wait is not None and not self._is_broken:
            self._is_broken = True
            break_groups()
        if not self._is_told and time.monotonic() - self._since > _LAST_S:
            log.error("Rank %d is ended. %s", self._rank, self._verdict)
            end_now(1)

    def _compare(self, own: list[Any]) -> list[Any] | None:
        """Return what each rank waits for, or None for one that does not wait."""
        self._store.set(self._waits[self._rank], json.dumps(own))
        if not self._store.check(self._waits):
            return None
        return [json.loads(one or "null") for one in self._store.multi_get(self._waits)]

    def _tell(self, text: str, by: int | None) -> None:
        """Write the cause, unless there is one, for all ranks; `by` is the rank that failed."""
        cause = json.dumps([by, text[:_MAX_CAUSE]])
        self._asking(lambda: self._store.compare_set(f"{self._prefix}cause", "", cause))
        self._asking(self._hear)

    def _asking(self, work: Callable[[], T]) -> T | None:
        """Return what `work` does with the store; None once that is gone, with its rank."""
        if not self._has_store:
            return None
        try:
            return work()
        except RuntimeError:
            self._has_store = False
            return None

    def _read_cause(self) -> Exception | None:
        """Return the error that there is if another rank has failed."""
        cause = f"{self._prefix}cause"
        if not self._store.check([cause]):
            return None
        self._hear()
        rank, text = json.loads(self._store.get(cause))
        if rank is None:
            return PeerError(f"All ranks end: {text}")
        return PeerError(f"Rank {rank} failed: {text}")

    def _hear(self) -> None:
        """Count this rank among those that know the cause."""
        if not self._has_heard:
            self._has_heard = True
            self._store.add(f"{self._prefix}heard", 1)

    def _find_wait(self, main: int) -> _Wait | None:
        """Return what this rank waits for, in a call of ours or, by its place, of the user's."""
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
        """Return the verdict anew: an error that is raised twice would show both places."""
        assert self._verdict is not None
        self._is_told = True
        return type(self._verdict)(str(self._verdict))

    def _listen(self) -> None:
        """Have signals noted when they come, not only once Python gets round to it."""
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
    """Return the error for ranks that do not do the same.

    Args:
        whats: What each waits for; follow "wants to".
        ranks: Their numbers; None for 0, 1, ...
    """
    groups: dict[str, list[int]] = {}
    for rank, what in zip(range(len(whats)) if ranks is None else ranks, whats, strict=True):
        groups.setdefault(what, []).append(rank)
    return UnsupportedError(
        explain(
            expected="all ranks to do the same",
            found="; ".join(_told(what, ranks) for what, ranks in groups.items()),
            remedy="Call the pipelined module, trainer.save_checkpoint and whatever talks to other "
            "ranks on every rank, not under `if self.global_rank == 0`, and let every rank take "
            "the same path through each hook.",
        )
    )


def _told(what: str, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} wants to {what}"
    return f"ranks {', '.join(map(str, ranks))} want to {what}"


def _kind(what: str) -> str:
    """Return what is waited for, without the place in the user's program."""
    return what.partition(" (")[0]
