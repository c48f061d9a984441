"""Access of callbacks to the strategy, and checks of their arguments."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.strategy import GNNPipeStrategy


def pipe_strategy(callback: Callback, trainer: pl.Trainer) -> GNNPipeStrategy:
    """Return the Trainer's strategy; raise `ConfigError` unless it is `GNNPipeStrategy`."""
    if not isinstance(trainer.strategy, GNNPipeStrategy):
        raise ConfigError(
            explain(
                expected=f"{type(callback).__name__} to be used with GNNPipeStrategy",
                found=type(trainer.strategy).__name__,
                remedy="Use Trainer(strategy=GNNPipeStrategy(...)), or drop the callback.",
            )
        )
    return trainer.strategy


def has_trained(callback: Callback, trainer: pl.Trainer) -> bool:
    """Whether a training step has run: not if a run resumes at the end of an epoch."""
    return pipe_strategy(callback, trainer).engine.last_step.record is not None


def check_count(name: str, value: object, least: int) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            explain(
                expected=f"'{name}' to be an integer of at least {least}",
                found=repr(value),
                remedy="Give a number of epochs.",
            )
        )
