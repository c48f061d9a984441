"""What a Lightning user may bring that cannot work on stages; refused before training begins."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_gnnpipe.errors import UnsupportedError, explain

_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that evaluate the loss several times a step.

    Raises:
        UnsupportedError: With the optimizer.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                explain(
                    expected="an optimizer that evaluates the loss once a step",
                    found="LBFGS, whose line search would differ between stages",
                    remedy="Use Adam, AdamW or SGD.",
                )
            )


def check_precision(plugin: Precision) -> None:
    """Refuse loss scaling, which would decide on each stage by itself whether to skip a step.

    Raises:
        UnsupportedError: If the plugin scales the loss.
    """
    if getattr(plugin, "scaler", None) is not None:
        raise UnsupportedError(
            explain(
                expected="a precision without loss scaling on several stages",
                found="precision='16-mixed'",
                remedy="Use precision='bf16-mixed'.",
            )
        )


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that need all parameters on every rank while training.

    Raises:
        UnsupportedError: With the callback.
    """
    averaging = tuple(c for name in _AVERAGING if (c := getattr(pl_callbacks, name, None)))
    for callback in callbacks:
        if isinstance(callback, averaging):
            raise UnsupportedError(
                explain(
                    expected="callbacks that work on a stage's own parameters",
                    found=type(callback).__name__,
                    remedy="Average weights on one device, or over saved checkpoints.",
                )
            )


def check_was_called(name: str, was_called: bool) -> None:
    """Refuse a training step that went past the pipelined module.

    Raises:
        UnsupportedError: With the module's name.
    """
    if not was_called:
        raise UnsupportedError(
            explain(
                expected=f"training_step to call the pipelined module '{name or 'self'}'",
                found="no call of it",
                remedy="Call its forward, or name the module you call by "
                "GNNPipeStrategy(pipelined_module=...).",
            )
        )
