"""When shards of the graph wait for each other."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.callbacks.access import check_count, pipe_strategy


class BoundedStaleness(Callback):
    """Makes every n-th epoch of asynchronous exchange a synchronous one.

    With `GNNPipeStrategy(async_halo=True)`. Rows of other shards are then at most n epochs away
    from an epoch in which all were fresh.

    Source: Sylvie (arXiv 2303.01277), Bounded Staleness Adaptor.

    Args:
        sync_every_n_epochs: Epochs from one synchronous epoch to the next.

    Raises:
        ConfigError: If `sync_every_n_epochs` is not an integer of at least 1.

    Example:
        >>> from lightning_gnnpipe import BoundedStaleness
        >>> callback = BoundedStaleness(sync_every_n_epochs=10)
    """

    def __init__(self, sync_every_n_epochs: int) -> None:
        super().__init__()
        check_count("sync_every_n_epochs", sync_every_n_epochs, 1)
        self.sync_every_n_epochs = sync_every_n_epochs

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pipe_strategy(self, trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch + 1) % self.sync_every_n_epochs == 0:
            pipe_strategy(self, trainer).controls.is_synchronous = True
