"""Trainers to compare: plain Lightning on one device, and the strategy with exact epochs only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.staleness import METHODS, StalenessMethod
from lightning_gnnpipe.types import StartMethod
from tests.helpers.realistic import Realistic, realistic_graph


@contextmanager
def double_precision() -> Iterator[None]:
    """Have new tensors in float64 within the block."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@dataclass(frozen=True, slots=True)
class OptionsWithMethod(StrategyOptions):
    """Options with a method that has no name."""

    given: StalenessMethod = METHODS["constant"]

    @property
    def method(self) -> StalenessMethod:
        return self.given


def with_method(strategy: GNNPipeStrategy, method: StalenessMethod) -> GNNPipeStrategy:
    """Have `strategy` meet staleness by `method`; return it."""
    options = strategy.options
    known = {field.name: getattr(options, field.name) for field in fields(options)}
    strategy.options = strategy._host._options = OptionsWithMethod(**known, given=method)
    return strategy


def quiet_trainer(
    num_ranks: int = 1,
    piped: dict[str, Any] | None = None,
    kind: type[L.Trainer] = L.Trainer,
    **options: Any,
) -> L.Trainer:
    """Return a Trainer on the CPU that prints and keeps nothing, of forked processes.

    Args:
        num_ranks: Number of processes.
        piped: Options of the strategy, and a "method" of another kind; None is plain Lightning.
        kind: Class of the Trainer.
        options: Of the Trainer.
    """
    strategy: Any = "auto"
    if piped is not None:
        piped = {"start_method": "fork", **piped}
        method = piped.pop("method", None)
        strategy = GNNPipeStrategy(**piped)
        strategy = strategy if method is None else with_method(strategy, method)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {"accelerator": "cpu", "devices": num_ranks, "strategy": strategy}
    return kind(**{**quiet, **dict.fromkeys(names, False), **options})


def make_trainer(
    num_stages: int, epochs: int, *callbacks: L.Callback, num_shards: int = 1, **kwargs: Any
) -> L.Trainer:
    """Return a Trainer; 0 stages is plain Lightning, otherwise all epochs are exact.

    Processes are forked, unless they are there already.
    """
    piped: dict[str, Any] | None = None
    if num_stages:
        piped = {"num_chunks": 4, "graph_parallel": num_shards, "start_method": start_method()}
        callbacks = (*callbacks, StalenessWarmup(num_epochs=1000))
    options = {
        "max_epochs": epochs,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        "callbacks": list(callbacks),
        **kwargs,
    }
    return quiet_trainer(max(num_stages, 1) * num_shards, piped, **options)


def start_method() -> StartMethod:
    """Return how processes are to be started: by nobody, if torchrun has."""
    return "popen" if "TORCHELASTIC_RUN_ID" in os.environ else "fork"


def make_module(**kwargs: Any) -> Realistic:
    L.seed_everything(1, verbose=False)
    return Realistic(**kwargs)


def datamodule() -> FullGraphDataModule:
    return FullGraphDataModule(realistic_graph())


def weights(module: torch.nn.Module) -> torch.Tensor:
    """Return all parameters of `module` as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def assert_same(found: L.LightningModule, expected: L.LightningModule) -> None:
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-10)
