"""Exact epochs before stale ones."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.callbacks.access import check_count, pipe_strategy


class StalenessWarmup(Callback):
    """Trains the first epochs by the exact schedule, which also fills the histories.

    While weights change fast, stale rows are far from fresh ones. The first epoch is always exact.

    Args:
        num_epochs: Exact epochs, counted from epoch 0.

    Raises:
        ConfigError: If `num_epochs` is negative or not an integer.

    Example:
        >>> from lightning_gnnpipe import StalenessWarmup
        >>> callback = StalenessWarmup(num_epochs=10)
    """

    def __init__(self, num_epochs: int) -> None:
        super().__init__()
        check_count("num_epochs", num_epochs, 0)
        self.num_epochs = num_epochs

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pipe_strategy(self, trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch < self.num_epochs:
            pipe_strategy(self, trainer).controls.is_exact = True
