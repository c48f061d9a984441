"""Histories renewed every few epochs."""

from __future__ import annotations

from typing import get_args

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.callbacks.access import check_count, pipe_strategy
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.types import RefreshMethod


class HistoryRefresh(Callback):
    """Renews what stale reads are served from.

    Source: GNNPipe (arXiv 2308.10087), technique 2, for `how="snapshot"`.

    Args:
        every_n_epochs: Epochs between renewals (the paper: 23).
        how: "snapshot": stale reads come from a snapshot of the histories, renewed at the end of
            every n-th epoch and of every exact one. "exact": before every n-th epoch all histories
            are recomputed by an exact forward pass with dropout off, at the price of one forward
            pass without overlap.

    Raises:
        ConfigError: If an argument cannot be right.

    Example:
        >>> from lightning_gnnpipe import HistoryRefresh
        >>> callback = HistoryRefresh(every_n_epochs=23)
    """

    def __init__(self, every_n_epochs: int, how: RefreshMethod = "snapshot") -> None:
        super().__init__()
        check_count("every_n_epochs", every_n_epochs, 1)
        if how not in get_args(RefreshMethod):
            raise ConfigError(
                explain(
                    expected="'how' to be 'snapshot' or 'exact'",
                    found=repr(how),
                    remedy="Choose one of them.",
                )
            )
        self.every_n_epochs = every_n_epochs
        self.how = how

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pipe_strategy(self, trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        controls = pipe_strategy(self, trainer).controls
        epoch = trainer.current_epoch
        if self.how == "snapshot":
            controls.serves_snapshot = True
            controls.takes_snapshot = (epoch + 1) % self.every_n_epochs == 0
        else:
            controls.refreshes = epoch > 0 and epoch % self.every_n_epochs == 0
