"""What a precision plugin does with the gradients of one process, done over all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine import PipelinedModel, clip_by_total_norm, share_overflows


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
