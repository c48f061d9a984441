"""Synchronous epochs between asynchronous halo exchanges."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.callbacks.access import check_count, pipe_strategy
from lightning_gnnpipe.errors import ConfigError, explain


class BoundedStaleness(Callback):
    """Makes every n-th epoch of asynchronous halo exchange synchronous.

    Needs `GNNPipeStrategy(async_halo=True)`. All halo rows are then fresh once in n epochs.

    Source: Sylvie (arXiv 2303.01277), Bounded Staleness Adaptor.

    Args:
        sync_every_n_epochs: Epochs from one synchronous epoch to the next.

    Raises:
        ConfigError: If `sync_every_n_epochs` is not an integer of at least 1, or, once it is used,
            if the strategy has no `async_halo`.

    Example:
        >>> from lightning_gnnpipe import BoundedStaleness
        >>> callback = BoundedStaleness(sync_every_n_epochs=10)
    """

    def __init__(self, sync_every_n_epochs: int) -> None:
        super().__init__()
        check_count("sync_every_n_epochs", sync_every_n_epochs, 1)
        self.sync_every_n_epochs = sync_every_n_epochs

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not pipe_strategy(self, trainer).options.async_halo:
            raise ConfigError(
                explain(
                    expected="'async_halo' with BoundedStaleness",
                    found="async_halo=False, with which shards wait for each other in every epoch",
                    remedy="Use GNNPipeStrategy(graph_parallel=2, async_halo=True), or drop the "
                    "callback.",
                )
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch + 1) % self.sync_every_n_epochs == 0:
            pipe_strategy(self, trainer).controls.is_synchronous = True
