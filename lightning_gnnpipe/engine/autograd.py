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

from lightning_gnnpipe._compat_torch import fills_grad_of
from lightning_gnnpipe.errors import UnsupportedError, explain

Backward = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class _Seam(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        outputs: Sequence[Tensor],
        constant: Sequence[Tensor],
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_backward(ctx)
        return (None, None, None, None, *ctx.run_backward(grads))


def join(
    backward: Backward,
    outputs: Sequence[Tensor],
    has_gradient: Sequence[bool],
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """Return `outputs` with `backward` as their backward.

    Args:
        backward: Takes the outputs' gradients, None for those that have none; returns those of
            `leaves`.
        outputs: Detached tensors.
        has_gradient: Whether gradients flow through each of them.
        leaves: Tensors of the batch whose gradients are wanted.
    """
    anchor = torch.zeros((), requires_grad=True)
    constant = [one for one, flows in zip(outputs, has_gradient, strict=True) if not flows]
    return list(cast(Any, _Seam).apply(backward, outputs, constant, anchor, *leaves))


def _check_backward(ctx: Any) -> None:
    """Refuse a backward that wants other gradients than those of all weights.

    Raises:
        UnsupportedError: With the call.
    """
    (anchor, _), *_ = ctx.next_functions
    if not torch.is_grad_enabled() and fills_grad_of(anchor):
        return
    found = "create_graph=True" if torch.is_grad_enabled() else "torch.autograd.grad, or inputs="
    raise UnsupportedError(
        explain(
            expected="one loss.backward() through the pipelined module, which gives all weights "
            "their gradients",
            found=found,
            remedy="Gradients of gradients do not go through the pipeline: compute such a penalty "
            "from the module's outputs alone, or train without the strategy. To read the gradient "
            "of an input, call x.requires_grad_(), then loss.backward(), and read x.grad.",
        )
    )
