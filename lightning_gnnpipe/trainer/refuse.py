"""Refuses what cannot work on stages or replicas: optimizers, loss scaling, uncalled modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_gnnpipe.errors import ConfigError, UnsupportedError


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that evaluate the loss several times per step."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            refuse_evaluations(type(optimizer).__name__)


def refuse_evaluations(name: str) -> NoReturn:
    """Refuse an optimizer that evaluates the loss several times per step."""
    _refuse(
        "an optimizer that evaluates the loss once per step",
        f"{name}, which evaluates it several times",
        "Use Adam, AdamW or SGD.",
    )


def check_scaling(plugin: Precision, is_async: bool) -> None:
    """Refuse loss scaling with async shards: the last step's gradients had another scale."""
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
