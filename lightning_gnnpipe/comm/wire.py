"""On which device messages travel: NCCL sends from GPU to GPU, gloo from CPU to CPU.

A process group for GPUs has both, gloo for tensors of the CPU and NCCL for those of the GPU. NCCL
refuses two ranks on one GPU, which cannot be seen from the numbers of the devices (`cuda:0` of two
processes need not be one GPU). So ranks tell each other, by gloo, which GPU they have.

NCCL knows no tags: it matches the messages of two ranks by their order. The schedule has the one
rank send in the order in which the other one receives.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_gnnpipe.fallbacks import Fallbacks

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
