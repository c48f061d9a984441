"""Refresh of the rows that stale reads return, every few epochs."""

from __future__ import annotations

from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.callbacks.access import check_count, pipe_strategy
from lightning_gnnpipe.errors import ConfigError, explain

RefreshHow = Literal["exact", "snapshot"]


class EmbeddingRefresh(Callback):
    """Renews the embeddings that stale reads return, every n epochs.

    With `how="exact"`, a forward pass without overlap recomputes all histories before every n-th
    epoch, with the present weights and without dropout. It costs nothing if validation has just run
    on the same weights and inputs: its rows are used.

    With `how="snapshot"`, stale reads return a copy of all rows, taken after every n-th epoch and
    every exact one. The copy takes as much memory as the histories.

    Source: GNNPipe (arXiv 2308.10087), technique 2, for "snapshot"; the paper's n is 23.

    Args:
        every_n_epochs: Epochs from one refresh to the next.
        how: "exact" or "snapshot".

    Raises:
        ConfigError: If `every_n_epochs` is not a positive integer, or `how` is invalid; once it is
            used, if the strategy has no stale rows.

    Example:
        >>> from lightning_gnnpipe import EmbeddingRefresh
        >>> callback = EmbeddingRefresh(every_n_epochs=10)
    """

    def __init__(self, every_n_epochs: int, how: RefreshHow = "exact") -> None:
        super().__init__()
        check_count("every_n_epochs", every_n_epochs, 1)
        if how not in get_args(RefreshHow):
            raise ConfigError(
                explain(
                    expected="'how' of EmbeddingRefresh to be 'exact' or 'snapshot'",
                    found=repr(how),
                    remedy="'exact' computes all rows again, 'snapshot' keeps a copy of them.",
                )
            )
        self.every_n_epochs, self.how = every_n_epochs, how

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        setting = pipe_strategy(self, trainer).options.for_graphs
        if setting:
            raise ConfigError(
                explain(
                    expected="stale rows for EmbeddingRefresh to renew",
                    found=f"{setting}, with which no row is stale",
                    remedy="Drop the callback, or the other.",
                )
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_due = self.how == "exact" and self._is_due(trainer.current_epoch + 1)
        if is_due and not trainer.sanity_checking:
            pipe_strategy(self, trainer).controls.takes_validation = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        controls = pipe_strategy(self, trainer).controls
        if self.how == "exact" and batch_idx == 0 and self._is_due(trainer.current_epoch):
            controls.refreshes = True
        elif self.how == "snapshot":
            controls.reads_snapshot = True
            if trainer.is_last_batch and self._is_due(trainer.current_epoch + 1):
                controls.takes_snapshot = True

    def _is_due(self, epoch: int) -> bool:
        return epoch > 0 and epoch % self.every_n_epochs == 0
