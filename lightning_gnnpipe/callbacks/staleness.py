"""Staleness figures, once an epoch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.callbacks.access import check_count, has_trained, pipe_strategy


class StalenessMonitor(Callback):
    """Logs how stale the reads of an epoch were.

    Keys: `history/stale_frac` (share of halo rows from an earlier epoch), `history/age_epochs`
    (their mean age), `history/drift` and `history/drift/layer_<i>` (|H_stale - H_fresh| /
    |H_fresh| over the rows that the epoch rewrote, dropout included). The drift costs one more read
    of every history.

    Args:
        every_n_epochs: Measure and log the last of every n epochs.

    Raises:
        ConfigError: If `every_n_epochs` is not a positive integer.

    Example:
        >>> from lightning_gnnpipe import StalenessMonitor
        >>> callback = StalenessMonitor()
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        check_count("every_n_epochs", every_n_epochs, 1)
        self.every_n_epochs = every_n_epochs

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pipe_strategy(self, trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due(trainer):
            pipe_strategy(self, trainer).controls.records_staleness = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._is_due(trainer) or not has_trained(self, trainer):
            return
        layers = pipe_strategy(self, trainer).collect_staleness()
        rows = sum(one.rows for one in layers.values())
        stale = sum(one.stale_rows for one in layers.values())
        age = sum(one.age_sum for one in layers.values())
        norm_sq = sum(one.norm_sq for one in layers.values())
        drift_sq = sum(one.drift_sq for one in layers.values())
        values = {
            "history/stale_frac": stale / rows if rows else 0.0,
            "history/age_epochs": age / stale if stale else 0.0,
            "history/drift": (drift_sq / norm_sq) ** 0.5 if norm_sq else 0.0,
        }
        values |= {f"history/drift/layer_{layer}": one.drift for layer, one in layers.items()}
        pl_module.log_dict(values, batch_size=1)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0
