"""The seam between the user's autograd graph and the pipeline's.

The outputs of the pipelined forward are leaves of the pipeline and roots of nothing: when the
user's loss reaches them in backward, the pipeline's own backward phase runs, and the gradients of
the batch's tensors, if they have any, go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Backward = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]


class _Seam(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backward: Backward, outputs: Sequence[Tensor], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run_backward = backward
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.run_backward(grads))


def join(backward: Backward, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return `outputs` with `backward` as their backward.

    Args:
        backward: Takes the outputs' gradients, returns those of `leaves`.
        outputs: Detached tensors.
        leaves: Tensors of the batch whose gradients are wanted.
    """
    anchor = torch.zeros((), requires_grad=True)
    return list(cast(Any, _Seam).apply(backward, outputs, anchor, *leaves))
