"""Gradient clipping and loss scaling over all stages.

Clipping uses the norm over all stages. If one stage overflows, all stages skip the step, or their
scales and weights would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe import _compat_torch
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.steps import PipelinedModel


def work_over_stages(
    plugin: Precision, module: LightningModule, model: PipelinedModel, pipe: Transport
) -> Callable[[], None]:
    """Let `plugin` clip by the norm over all stages, and skip a step if any stage overflows.

    `plugin` is set up already; `module` holds all parameters. Returns an undo function.
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
    patched = ExitStack()
    patched.callback(plugin.__dict__.pop, "clip_grad_by_norm", None)
    patched.callback(plugin.__dict__.pop, "clip_grad_by_value", None)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        patched.callback(share_overflows(scaler, pipe, model.reads.inside))
    return patched.close


def clip_by_total_norm(
    model: PipelinedModel,
    transport: Transport,
    root: nn.Module,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
) -> Tensor:
    """Scale gradients to a norm over all stages of at most `max_norm`; collective.

    Stages' parameters count on their rank, tied ones once, replicated ones on the first rank, rows
    of tables on their shard, in each replica. `root` holds them all. Returns the norm before
    clipping, equal on all ranks.
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
    """Return ids of the parameters of `root` that count on this rank; each counts once."""
    own, foreign = model.tensor_ids()
    if transport.mesh.shard:  # the stage's first rank counts what all shards have
        tables = model.tables.parameters() if model.tables.is_cut else ()
        return own & {id(one) for one in tables}
    replicated = {id(p) for p in root.parameters()} - own - foreign
    return own | replicated if transport.mesh.is_first else own


def share_overflows(
    scaler: torch.amp.GradScaler,
    transport: Transport,
    inside: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Make `scaler`, within `inside`, see overflows of all stages; return an undo function."""

    def over_stages(found_here: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        found = torch.zeros((), device=transport.world.device)
        for one in found_here.values():
            found += one.to(found.device)
        transport.all_reduce(found, "control")
        return {found.device: found.clamp_(max=1.0)}  # fused kernels compare it with 1

    return _compat_torch.change_overflows(scaler, over_stages, inside)
