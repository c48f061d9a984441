"""Refuses what cannot work on stages or replicas: optimizers, loss scaling, uncalled modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.nn.utils.prune import is_pruned
from torch.optim import Optimizer

from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.trainer import _compat

_WHOLE = "Use GNNPipeStrategy(weights='whole'), the default."


def check_optimizers(optimizers: Iterable[Optimizer], *, is_staged: bool) -> None:
    """Refuse optimizers that evaluate the loss several times per step, or may need all weights."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            refuse_evaluations(kind.__name__)
        names = [base.__module__ for base in kind.__mro__ if base not in (Optimizer, object)]
        if is_staged and not any(name.startswith("torch.optim.") for name in names):
            _refuse(
                "an optimizer of torch.optim, which updates each weight alone, with "
                "weights='staged'",
                f"{kind.__name__}, which may need all weights of a step",
                _WHOLE,
            )


def check_averages(trainer: pl.Trainer, module: nn.Module) -> None:
    """Refuse callbacks that read all weights in each step, where stages hold their own alone."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = [type(one).__name__ for one in callbacks if isinstance(one, _compat.READERS)]
    found += ["torch.nn.utils.prune"] if is_pruned(module) else []
    if found:
        _refuse("callbacks that read no weights, with weights='staged'", found[0], _WHOLE)


def refuse_evaluations(name: str) -> NoReturn:
    """Refuse an optimizer that evaluates the loss several times per step."""
    _refuse(
        "an optimizer that evaluates the loss once per step",
        f"{name}, which evaluates it several times",
        "Use Adam, AdamW or SGD.",
    )


def check_scaling(plugin: Precision, is_async: bool, is_staged: bool) -> None:
    """Refuse loss scaling with async shards: the last step's gradients had another scale.

    And with weights in stages, which would each find their own overflows.
    """
    if is_staged and getattr(plugin, "scaler", None) is not None:
        _refuse(
            "weights='staged' without loss scaling",
            'precision="16-mixed", whose overflows all stages must see',
            "Use precision=\"bf16-mixed\", or GNNPipeStrategy(weights='whole').",
        )
    if is_async and getattr(plugin, "scaler", None) is not None:
        _refuse(
            "async_halo=True without loss scaling",
            'precision="16-mixed", which changes the scale of gradients between steps',
            'Use "bf16-mixed", or async_halo=False.',
        )


def check_sync(is_asked: bool, num_replicas: int) -> None:
    """Refuse `sync_batchnorm` over replicas, each of which keeps its own statistics."""
    if is_asked and num_replicas > 1:
        _refuse(
            "sync_batchnorm=False with data_parallel",
            "sync_batchnorm=True, which has no effect: BatchNorm uses the statistics of each "
            "micro-batch",
            "Leave it out, or use LayerNorm or GraphNorm.",
        )


def refuse_import(what: str = "Trainer") -> NoReturn:
    """Refuse an object of `pytorch_lightning`, the same code as `lightning` under other names."""
    raise ConfigError(
        expected=f"a {what} of the package 'lightning'",
        found="one of 'pytorch_lightning'",
        remedy="Write `import lightning as L`, and L.Trainer, L.LightningModule, "
        "L.pytorch.callbacks in place of the names of pytorch_lightning. All else stays.",
    )


def _refuse(expected: str, found: str, remedy: str) -> NoReturn:
    raise UnsupportedError(expected=expected, found=found, remedy=remedy)
