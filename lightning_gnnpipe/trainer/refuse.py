"""Refuses optimizers, plugins and callbacks that cannot work on stages, before training."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_gnnpipe.errors import UnsupportedError, explain

log = logging.getLogger(__name__)


def check_optimizers(optimizers: Iterable[Optimizer], num_stages: int) -> None:
    """Refuse optimizers that evaluate the loss several times a step.

    On several stages, warn of unknown optimizers: they may mix weights of several layers.
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
        if num_stages > 1 and not type(optimizer).__module__.startswith("torch.optim"):
            log.warning(
                "%s is not one of torch.optim's. In its step each rank has the weights of its own "
                "stage only, so it has to treat every weight by itself, without norms over all.",
                type(optimizer).__name__,
            )


def check_scaling(plugin: Precision, is_async: bool) -> None:
    """Refuse loss scaling with async shards: the last step's gradients had another scale."""
    if is_async and getattr(plugin, "scaler", None) is not None:
        raise UnsupportedError(
            explain(
                expected="async_halo=True without loss scaling",
                found='precision="16-mixed", under which gradients of the last step are scaled '
                "otherwise",
                remedy='Use "bf16-mixed", or async_halo=False.',
            )
        )


def check_sync(is_asked: bool, num_replicas: int) -> None:
    """Refuse `sync_batchnorm` over replicas, each of which keeps its own statistics."""
    if is_asked and num_replicas > 1:
        raise UnsupportedError(
            explain(
                expected="sync_batchnorm=False with data_parallel",
                found="sync_batchnorm=True, which would change nothing: BatchNorm has the "
                "statistics of each micro-batch",
                remedy="Leave it out, or use LayerNorm or GraphNorm.",
            )
        )


def check_sharded(callbacks: Iterable[Callback], saves_sharded: bool) -> None:
    """Refuse callbacks that save two sets of weights into a sharded checkpoint."""
    kind = getattr(pl_callbacks, "WeightAveraging", None)  # from Lightning 2.6
    for callback in callbacks:
        if saves_sharded and kind is not None and isinstance(callback, kind):
            raise UnsupportedError(
                explain(
                    expected="one set of weights in a sharded checkpoint",
                    found=f"{type(callback).__name__}, which saves two",
                    remedy="Leave save_distributed_checkpoint off.",
                )
            )


def check_pruning(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that replace parameters, since stages would not know."""
    for callback in callbacks:
        if isinstance(callback, pl_callbacks.ModelPruning):
            raise UnsupportedError(
                explain(
                    expected="callbacks that keep the parameters, with several stages",
                    found=f"{type(callback).__name__}, which puts masked ones in their place",
                    remedy="Prune after training, or with num_stages=1.",
                )
            )


def check_was_called(name: str, was_called: bool) -> None:
    """Refuse a training step that did not call the pipelined module `name`."""
    if was_called:
        return
    raise UnsupportedError(
        explain(
            expected=f"training_step to call the pipelined module '{name or 'self'}'",
            found="no call of it",
            remedy="Call its forward, or name the module you call by "
            "GNNPipeStrategy(pipelined_module=...).",
        )
    )
