"""Gradient clipping and loss scaling over all stages.

Clipping uses the norm over all stages. If one stage overflows, all stages skip the step, or their
scales and weights would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe import _compat_torch
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.passing import replace_attributes
from lightning_gnnpipe.steps import PipelinedModel
from lightning_gnnpipe.trainer.weight_callbacks import within


def work_over_stages(
    plugin: Precision, module: LightningModule, model: PipelinedModel, pipe: Transport
) -> Callable[[], None]:
    """Let `plugin` clip by the norm over all stages, and skip a step if any stage overflows.

    `plugin` is set up already; `module` holds all parameters. Returns an undo function.
    """
    inside, patched = model.reads.inside, ExitStack()

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        clip_by_total_norm(model, pipe, module, plugin.main_params(optimizer), clip_val)

    def overflows(found_here: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        found = torch.zeros((), device=pipe.world.device)
        for one in found_here.values():
            found += one.to(found.device)
        pipe.all_reduce(found, "control")
        return {found.device: found.clamp_(max=1.0)}  # fused kernels compare it with 1

    clips = {"clip_grad_by_norm": clip, "clip_grad_by_value": plugin.clip_grad_by_value}
    clips = {name: within(inside, work) for name, work in clips.items()}
    patched.enter_context(replace_attributes(plugin, clips))
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        patched.callback(_compat_torch.change_overflows(scaler, overflows, inside))
    return patched.close


def clip_by_total_norm(
    model: PipelinedModel,
    transport: Transport,
    root: nn.Module,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
) -> None:
    """Scale gradients to a norm over all stages of at most `max_norm`; collective.

    Stages' parameters count on their rank, tied ones once, replicated ones on the first rank, rows
    of tables on their shard, in each replica. `root` holds them all.
    """
    grads = {id(p): p.grad for p in parameters if p.grad is not None}
    square = torch.zeros((), dtype=torch.float64, device=transport.world.device)
    counted = _counted(model, transport, root)
    for grad in (grad for ident, grad in grads.items() if ident in counted):
        square += torch.linalg.vector_norm(grad.detach()).double().square()
    transport.all_reduce(square, "control")
    scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for grad in grads.values():
        grad.mul_(scale.to(grad.dtype))


def _counted(model: PipelinedModel, transport: Transport, root: nn.Module) -> set[int]:
    """Return ids of the parameters of `root` that count on this rank; each counts once."""
    own, foreign = model.tensor_ids()
    if transport.mesh.shard:  # the stage's first rank counts what all shards have
        tables = model.tables.parameters() if model.tables.is_cut else ()
        return own & {id(one) for one in tables}
    replicated = {id(p) for p in root.parameters()} - own - foreign
    return own | replicated if transport.mesh.is_first else own
