"""Gradient clipping and loss scaling over all stages.

Clipping needs the norm over the gradients of all stages. A loss scaler looks at the gradients of
its own process: where one stage overflows, all stages must skip the step, or their scales and
weights drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe import _compat_torch
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.steps import PipelinedModel


def loss_scale(plugin: Precision) -> float:
    """Return the factor that `plugin` puts on the next loss."""
    scaler = getattr(plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


class StagePrecision:
    """Clips by the norm over all stages, and skips a step where any of them overflows."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def attach(
        self, plugin: Precision, module: LightningModule, model: PipelinedModel, pipe: Transport
    ) -> None:
        """Change `plugin`.

        Args:
            plugin: Of the Trainer, set up already.
            module: The module that holds all parameters.
            model: The pipelined model in it.
            pipe: The ranks.
        """
        clip_by_value = plugin.clip_grad_by_value

        def clip(optimizer: Optimizer, clip_val: float) -> None:
            parameters = plugin.main_params(optimizer)
            with model.reads.inside():
                clip_by_total_norm(model, pipe, module, parameters, clip_val)

        def clip_values(optimizer: Optimizer, clip_val: float) -> None:
            with model.reads.inside():
                clip_by_value(optimizer, clip_val)

        plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]
        plugin.clip_grad_by_value = clip_values  # type: ignore[method-assign]
        self._undo.append(lambda: plugin.__dict__.pop("clip_grad_by_norm", None))
        self._undo.append(lambda: plugin.__dict__.pop("clip_grad_by_value", None))
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            self._undo.append(share_overflows(scaler, pipe, model.reads.inside))

    def detach(self) -> None:
        """Give the plugin back as it was."""
        while self._undo:
            self._undo.pop()()


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


def share_overflows(
    scaler: torch.amp.GradScaler,
    transport: Transport,
    inside: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Let `scaler` find what any stage finds, from now on; return what gives it back as it was.

    It looks at gradients within the context `inside`.
    """

    def over_stages(found_here: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        found = torch.zeros((), device=transport.world.device)
        for one in found_here.values():
            found += one.to(found.device)
        transport.all_reduce(found, "control")
        return {found.device: found.clamp_(max=1.0)}  # fused kernels ask whether it is 1

    return _compat_torch.change_overflows(scaler, over_stages, inside)
