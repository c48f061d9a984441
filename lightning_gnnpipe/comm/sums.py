"""Sums along the pipe axis, and broadcasts of tensors that single ranks own.

    stage 0  <--  own + later  --  stage 2  <--  own + later  --  stage 3       summed on the way
             -------- total ------------->   -------- total ----------->        and sent back

The first stage adds shards and replicas. The total is one tensor, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_gnnpipe.comm.transport import Label, Transport
from lightning_gnnpipe.types import TrafficKind


def share_tensors(
    transport: Transport,
    owners: Mapping[str, int],
    local: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[str, Tensor]:
    """Broadcast each tensor of `owners` (name to rank, same order everywhere); return all."""
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


def sum_along_pipe(
    transport: Transport,
    own: Tensor,
    stages: Sequence[int],
    kind: TrafficKind,
    number: int,
    *,
    num_flags: int = 0,
    over_replicas: bool = False,
) -> Tensor:
    """Return the sum of `own`, `[num_elements]`, over `stages` (ascending) and their shards.

    The ranks must make the same calls in the same order, with no other message in flight between
    them. The last `num_flags` elements count as control.
    """
    mesh, label = transport.mesh, Label(kind, number)
    place = stages.index(mesh.stage)
    later = None if place + 1 == len(stages) else mesh.rank_of(stages[place + 1])

    def receive(source: int) -> Tensor:
        transport.post_receive(source, label, [torch.empty_like(own)])
        [received] = transport.wait_receive(label)
        transport.meter.recount(kind, "control", num_flags * own.element_size())
        return received

    total = own if later is None else own + receive(later)
    if place > 0:
        earlier = mesh.rank_of(stages[place - 1])
        transport.send(earlier, label, [total])
        total = receive(earlier)
    else:
        if mesh.num_shards > 1:
            transport.start_sum(total, kind, mesh.shards, num_flags=num_flags)()
        if over_replicas:
            transport.start_sum(total, "data_grad", mesh.replicas, num_flags=num_flags)()
    if later is not None:
        transport.send(later, label, [total])
    transport.flush()
    return total
