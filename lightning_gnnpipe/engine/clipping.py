"""Clipping by the norm of the whole gradient, which no rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_gnnpipe.engine.engine import PipelineEngine


def clip_by_total_norm(
    engine: PipelineEngine, root: nn.Module, parameters: Iterable[nn.Parameter], max_norm: float
) -> Tensor:
    """Scale the gradients of `parameters` so that their norm over all stages is at most `max_norm`.

    Parameters of a stage count on its rank, tied ones once, replicated ones on the first rank. A
    collective call.

    Args:
        engine: The engine.
        root: The module that holds all parameters.
        parameters: Those to clip.
        max_norm: Largest 2-norm of their gradients.

    Returns:
        The norm before clipping, equal on all ranks.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    counted = engine.counted_parameters(root)
    grads = [p.grad.detach() for p in with_grad if p.grad is not None and id(p) in counted]
    square = torch.zeros((), dtype=torch.float64, device=engine.transport.mesh.device)
    for grad in grads:
        square += torch.linalg.vector_norm(grad).double().square()
    engine.transport.all_reduce(square, "control")
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in with_grad:
        assert p.grad is not None
        p.grad.mul_(scale.to(p.grad.dtype))
    return norm
