"""Tensors that single stages own, put together on one rank or on all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gnnpipe.comm.transport import Transport


def share_tensors(
    transport: Transport,
    owners: Mapping[str, int],
    local: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[str, Tensor]:
    """Return every tensor of `owners` on every rank, each broadcast by its owner.

    Args:
        transport: The ranks.
        owners: The rank that owns each tensor, equal on all ranks, in the same order.
        local: The tensors that this rank owns, at least.
        shapes: Shape and dtype of the others.
    """
    if owners:
        transport.meet("put the stages' weights together")
    shared = {}
    for name, owner in owners.items():
        if owner == transport.world.rank:
            tensor = local[name].detach().to(transport.world.device).contiguous()
        else:
            shape, dtype = shapes[name]
            tensor = torch.empty(shape, dtype=dtype, device=transport.world.device)
        transport.broadcast(tensor, owner, "control")
        shared[name] = tensor
    return shared
