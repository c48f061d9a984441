"""Process groups end before the interpreter does.

Threads of gloo let go of the tensors that were sent last. One that does so while the interpreter is
being taken down aborts a program that has done all its work: "terminate called without an active
exception", exit status 134 (https://github.com/pytorch/pytorch/issues/190489). Destroying a group
waits for its threads. A group that others refer to is not destroyed: `Members` has it weakly.
"""

from __future__ import annotations

import atexit
from weakref import ref

import torch.distributed as dist
from torch.distributed import ProcessGroup

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


def _end_groups() -> None:
    if dist.is_initialized() and any(one() is _world() for one in _made):
        dist.destroy_process_group()


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
