"""Ways to meet staleness that have no name, and passes that renew rows: what options do not say."""

from __future__ import annotations

from dataclasses import dataclass, fields

import lightning as L

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.history import METHODS, StalenessMethod
from lightning_gnnpipe.options import StrategyOptions


@dataclass(frozen=True, slots=True)
class _Options(StrategyOptions):
    """Has any method."""

    given: StalenessMethod = METHODS["constant"]

    @property
    def method(self) -> StalenessMethod:
        return self.given


def with_method(strategy: GNNPipeStrategy, method: StalenessMethod) -> GNNPipeStrategy:
    """Have `strategy` meet staleness by `method`; return it."""
    options = strategy.options
    known = {field.name: getattr(options, field.name) for field in fields(options)}
    strategy.options = _Options(**known, given=method)
    return strategy


class Refreshes(L.Callback):
    """Has all rows recomputed without dropout before every n-th epoch.

    Args:
        every_n_epochs: n.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, GNNPipeStrategy)
        epoch = trainer.current_epoch
        trainer.strategy.controls.refreshes = epoch > 0 and epoch % self.every_n_epochs == 0
