"""Process groups end before the interpreter does.

Threads of gloo let go of the tensors that were sent last. One that does so while the interpreter is
being taken down aborts a program that has done all its work: "terminate called without an active
exception", exit status 134 (https://github.com/pytorch/pytorch/issues/190489). Destroying a group
waits for its threads. A group that others refer to is not destroyed: `Members` has it weakly.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from weakref import ref

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_gnnpipe._compat_torch import default_store

_ERROR = "gnnpipe_error"
_LONGEST_WAIT = timedelta(seconds=2)

_made: list[ref[ProcessGroup]] = []  # the group of all ranks, where we have made it


def end_groups_at_exit(*, is_new: bool) -> None:
    """Destroy all process groups when the program ends, unless somebody else has made them.

    Args:
        is_new: Whether the group of all ranks was made just now.
    """
    if is_new:
        _made[:] = [ref(_world())]
    if any(one() is _world() for one in _made):
        atexit.unregister(_end_groups)
        atexit.register(_end_groups)


def abandon_groups() -> None:
    """Leave them as they are: their threads may wait for ranks that have failed."""
    atexit.unregister(_end_groups)


def first_rank_tells(error: str, rank: int, *, is_peers: bool) -> bool:
    """Whether rank 0 ends with the same error as this rank, so that one of them need print it.

    Args:
        error: Its type and text.
        rank: This rank; rank 0 makes its error known, others wait for it.
        is_peers: Whether this rank ends since another has failed; then any error of rank 0 does.
    """
    try:
        store = default_store()
        if rank == 0:
            store.set(_ERROR, error)
            return False
        store.wait([_ERROR], _LONGEST_WAIT)
        return is_peers or store.get(_ERROR) == error.encode()
    except (RuntimeError, ValueError):  # rank 0 runs on, or has ended; or there is no group
        return False


def _end_groups() -> None:
    if dist.is_initialized() and any(one() is _world() for one in _made):
        dist.destroy_process_group()


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
