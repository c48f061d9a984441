"""Hosts made of network namespaces on this machine: one link each, to a switch of their own.

host 0 ---veth--- switch ---veth--- host 1      Each is a namespace, the switch a bridge in one.
                    |                           No interface, address or route is made outside,
                   ...                          so nothing can leave, and nothing else comes in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"  # of each host
PORT = 29400
_COMMAND_S = 20
_GRACE_S = 5.0
# `tc tbf`: how much may pass at once, and how much may queue (a sender stops long before).
_BURST_S, _LEAST_BURST_BYTES, _QUEUE_BYTES = 0.001, 128 * 1024, 64 * 2**20


class HostsError(RuntimeError):
    """This machine, or this user, cannot have such hosts."""


class Hosts:
    """A context in which `num_hosts` hosts exist; they are gone when it ends, however it ends."""

    def __init__(self, num_hosts: int) -> None:
        self.names = [f"gnnpipe-{os.getpid()}-host{i}" for i in range(num_hosts)]
        self._switch = f"gnnpipe-{os.getpid()}-switch"

    def __enter__(self) -> Hosts:
        check_permission()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> list[str]:
        """Run `command` once on each host, started as torchrun would; return what each printed.

        Raises:
            RuntimeError: If one fails, or has not ended in time.
        """
        with tempfile.TemporaryDirectory() as folder:  # a pipe that nobody reads would fill up
            texts = [
                (Path(folder, f"out{i}"), Path(folder, f"err{i}")) for i in range(len(self.names))
            ]
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank, (out, err) in enumerate(texts):
                    processes.append(self._start(rank, command, environment, timeout_s, out, err))
                _wait(processes, timeout_s)
            finally:
                _end(processes)
            if any(process.returncode for process in processes):
                told = [f"host {i}: {err.read_text()[-3000:]}" for i, (_, err) in enumerate(texts)]
                raise RuntimeError("\n".join([f"{' '.join(command)} failed", *told]))
            return [out.read_text() for out, _ in texts]

    def _start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        out: Path,
        err: Path,
    ) -> subprocess.Popen[bytes]:
        limit = ["timeout", "-k", "5", str(int(timeout_s))]  # even if this process is gone
        with out.open("wb") as stdout, err.open("wb") as stderr:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[rank], *limit, *command],
                env={**os.environ, **environment, **self._environment(rank)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def links_of(self, rank: int) -> list[str]:
        """Return both ends of a host's link, for `limit_rate` on that host."""
        return [INTERFACE, f"{self._switch}:port{rank}"]

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": str(len(self.names)),
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "LINKS": " ".join(self.links_of(rank)),
        }

    def _make(self) -> None:
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            _call("ip", "netns", "add", name)
            peer = ["peer", "name", port, "netns", self._switch]
            _call("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *peer)
            _call("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _call("ip", "-n", name, "addr", "add", f"{_address(rank)}/24", "dev", INTERFACE)
            _call("ip", "-n", name, "link", "set", INTERFACE, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in (*self.names, self._switch):  # a link goes with its namespace
            for pid in _try("ip", "netns", "pids", name).split():  # a rank that did not end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _try("ip", "netns", "del", name)


def check_permission() -> None:
    """Raise `HostsError` if hosts cannot be made here."""
    if not sys.platform.startswith("linux"):
        raise HostsError(f"Expected Linux, for its network namespaces (got {sys.platform}).")
    if os.geteuid() != 0:
        raise HostsError("Expected to run as root, who may make network namespaces (got a user).")
    for tool in ("ip", "tc", "timeout"):
        if shutil.which(tool) is None:
            raise HostsError(f"Expected the command '{tool}' (not found). Install iproute2.")


def limit_rate(link: str, mbit: float | None) -> None:
    """Let no more through one end of a link, in the direction out of it; None for no limit.

    Args:
        link: An interface here, or `namespace:interface`.
        mbit: Mbit/s.
    """
    place, _, interface = link.rpartition(":")
    tc = ["tc", *(["-n", place] if place else []), "qdisc"]
    if mbit is None:
        _call(*tc, "replace", "dev", interface, "root", "pfifo", "limit", "10000")
        return
    burst = max(_LEAST_BURST_BYTES, int(mbit * 1e6 / 8 * _BURST_S))
    sizes = ["burst", str(burst), "limit", str(_QUEUE_BYTES)]
    _call(*tc, "replace", "dev", interface, "root", "tbf", "rate", f"{mbit:g}mbit", *sizes)


def received_bytes() -> int:
    """Return what has come in over this host's link so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[0])
    return 0


def _address(rank: int) -> str:
    return f"198.18.0.{rank + 1}"  # set aside for benchmarks, RFC 2544


def _try(*command: str) -> str:
    """Return what `command` printed; nothing if it failed."""
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S).stdout


def _call(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise HostsError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all have ended, or one has failed."""
    deadline = time.monotonic() + timeout_s + _GRACE_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run: when one has failed, the others first get a moment to say why."""
    has_failed = any(process.returncode for process in processes)
    deadline = time.monotonic() + (_GRACE_S if has_failed else 0.0)
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.terminate()  # `timeout` passes it on
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
