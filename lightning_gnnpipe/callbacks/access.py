"""Access of callbacks to the strategy, and checks of their arguments."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.strategy import GNNPipeStrategy


class PipeCallback(Callback):
    """A callback that works with `GNNPipeStrategy` only."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.strategy(trainer)

    def strategy(self, trainer: pl.Trainer) -> GNNPipeStrategy:
        """Return the Trainer's strategy; raise `ConfigError` unless it is `GNNPipeStrategy`."""
        if not isinstance(trainer.strategy, GNNPipeStrategy):
            raise ConfigError(
                expected=f"{type(self).__name__} to be used with GNNPipeStrategy",
                found=type(trainer.strategy).__name__,
                remedy="Use Trainer(strategy=GNNPipeStrategy(...)), or remove the callback.",
            )
        return trainer.strategy

    def has_trained(self, trainer: pl.Trainer) -> bool:
        """Whether a training step has run: not if a run resumes at the end of an epoch."""
        return self.strategy(trainer).engine.last_step.record is not None


def check_count(name: str, value: object, least: int) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            expected=f"'{name}' to be an integer of at least {least}",
            found=repr(value),
            remedy="Give a whole number of epochs.",
        )
