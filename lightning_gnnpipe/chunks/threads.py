"""The cores of this machine, and the threads of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DIVIDED_CORES = "GNNPIPE_DIVIDED_CORES"
"""Environment variable: the threads of each process, if the package has divided the cores."""
forks: list[int] = []  # this process, if it is a fork: more threads of OpenMP may wait for ever
os.register_at_fork(after_in_child=lambda: forks.append(os.getpid()))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_stage(num_ranks: int) -> int | None:
    """Return the threads of a rank while its stage, of `num_ranks` ranks, computes alone.

    None: leave their number, since a user or another launcher has set it, or it is enough.
    """
    number, own = num_cores() // num_ranks, torch.get_num_threads()
    shares = (os.environ.get(name) for name in (DIVIDED_CORES, "OMP_NUM_THREADS"))
    is_free = all(share == str(own) for share in shares) and not forks
    return number if is_free and number > own else None


@contextmanager
def computing_with(num_threads: int) -> Iterator[None]:
    """Compute with `num_threads` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
