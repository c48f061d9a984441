"""Process groups end before the interpreter does.

Threads of gloo let go of the tensors that were sent last. One that does so while the interpreter is
being taken down aborts a program that has done all its work: "terminate called without an active
exception", exit status 134 (https://github.com/pytorch/pytorch/issues/190489). Destroying a group
waits for its threads. A group that others refer to is not destroyed: `Members` has it weakly.
"""

from __future__ import annotations

import atexit

import torch.distributed as dist


def end_groups_at_exit() -> None:
    """Destroy all process groups when the program ends."""
    atexit.register(_end_groups)


def abandon_groups() -> None:
    """Leave them as they are: their threads may wait for ranks that have failed."""
    atexit.unregister(_end_groups)


def _end_groups() -> None:
    if dist.is_initialized():  # the program may have done it
        dist.destroy_process_group()
