"""Sends tensors of single stages along the pipe, or collects them on every rank.

    stage 0  <--  own + later  --  stage 2  <--  own + later  --  stage 3       summed on the way
             -------- total ------------->   -------- total ----------->        and given back

The first stage sums over shards and replicas. Only ranks of these stages take part. The total is
one tensor, so all ranks get the same bits.
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
    """Return the sum of the tensors that the ranks of `stages` have, all shards included.

    The ranks must make the same calls in the same order; nothing else may be on its way between
    them.

    Args:
        transport: The ranks.
        own: This rank's, `[num_elements]`.
        stages: The stages, ascending; this rank's is one of them.
        kind: What it is.
        number: Of the sum, to tell it from others.
        num_flags: How many elements at its end count as control.
        over_replicas: Whether those of all replicas are included.
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
