"""Process groups: where ranks find each other, what device they send from, how they end.

- torchrun with its static rendezvous (the default on one node) keeps one store over restarts.
  Ranks would find there the addresses of ranks that have ended, and wait for them.
- A process group for GPUs uses gloo for tensors of the CPU and NCCL for tensors of the GPU. NCCL
  refuses two ranks on one GPU, and `cuda:0` of two processes need not be one GPU. So ranks tell
  each other by gloo which GPU they have.
- NCCL knows no tags: it matches the messages of two ranks by their order. The schedule has one rank
  send in the order in which the other one receives.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_gnnpipe._compat_torch import default_store
from lightning_gnnpipe.fallbacks import Fallbacks

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


def restart_store(address: str, port: int, timeout: timedelta) -> Store | None:
    """Return a store for this restart of torchrun alone; None where there is no need for one.

    Restarts are counted by node. So this is for one node; on several, torchrun's own rendezvous
    (``--rdzv-backend=c10d``) makes a new store each time.

    Args:
        address: Of the store's host.
        port: Of the store.
        timeout: Longest wait for an answer of the store.
    """
    world_size = os.environ.get("WORLD_SIZE", "")
    is_one_node = world_size == os.environ.get("LOCAL_WORLD_SIZE")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_one_node:
        return None
    store = TCPStore(address, port, int(world_size), is_master=False, timeout=timeout)
    return PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


log = logging.getLogger(__name__)

GPU_BACKEND = "cpu:gloo,cuda:nccl"


def choose_wire(device: torch.device, backend: str) -> torch.device:
    """Return where tensors must be to be sent; a collective call on the default group.

    Args:
        device: Where this rank's tensors live.
        backend: That the group was made with.
    """
    if device.type != "cuda" or backend == "gloo":
        return torch.device("cpu") if backend == "gloo" else device
    if backend != GPU_BACKEND:  # the user's choice
        return device
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, gpu_name(device))
    shared = ranks_that_share(found)
    if not shared:
        return device
    Fallbacks(log, is_quiet=dist.get_rank() != 0).tell(
        f"Ranks {' and '.join(map(str, shared))} are on one GPU, which NCCL refuses",
        origin="messages by NCCL",
        to="messages by gloo, through the CPU",
    )
    return torch.device("cpu")


def ranks_that_share(gpus: Sequence[str]) -> list[int]:
    """Return the first ranks found to have the same GPU; none if all differ."""
    for gpu in gpus:
        ranks = [rank for rank, one in enumerate(gpus) if one == gpu]
        if len(ranks) > 1:
            return ranks
    return []


def gpu_name(device: torch.device) -> str:
    """Return a name that no other GPU of the job has."""
    index = torch.cuda.current_device() if device.index is None else device.index
    unique = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if unique is None:  # torch before 2.5: the numbers of what the process sees
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        unique = visible[index] if index < len(visible) and visible[index] else index
    return f"{socket.gethostname()}/{unique}"
