"""Clipping by the norm of the whole gradient, which no rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.model import PipelinedModel


def clip_by_total_norm(
    model: PipelinedModel,
    transport: Transport,
    root: nn.Module,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
) -> Tensor:
    """Scale the gradients of `parameters` so that their norm over all stages is at most `max_norm`.

    Parameters of a stage count on its rank, tied ones once, replicated ones on the first rank, all
    in each replica. A collective call.

    Args:
        model: The pipelined model.
        transport: The ranks.
        root: The module that holds all parameters.
        parameters: Those to clip.
        max_norm: Largest 2-norm of their gradients.

    Returns:
        The norm before clipping, equal on all ranks.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    counted = _counted(model, transport, root)
    grads = [p.grad.detach() for p in with_grad if p.grad is not None and id(p) in counted]
    square = torch.zeros((), dtype=torch.float64, device=transport.world.device)
    for grad in grads:
        square += torch.linalg.vector_norm(grad).double().square()
    transport.all_reduce(square, "control")
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in with_grad:
        assert p.grad is not None
        p.grad.mul_(scale.to(p.grad.dtype))
    return norm


def _counted(model: PipelinedModel, transport: Transport, root: nn.Module) -> set[int]:
    """Return the ids of the parameters of `root` that count on this rank; each counts once."""
    if transport.mesh.shard:  # the stage's first rank has the same
        return set()
    named = dict(model.module.named_parameters())
    pipelined = {id(named[name]) for name in model.pipelined if name in named}
    owned = {id(named[name]) for name in model.owned if name in named}
    replicated = {id(p) for p in root.parameters()} - pipelined
    return owned | replicated if transport.mesh.is_first else owned
