"""Callbacks that control staleness: exact epochs, synchronous epochs, refreshed embeddings."""

from __future__ import annotations

from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.errors import ConfigError, checks_names
from lightning_gnnpipe.strategy import GNNPipeStrategy

RefreshHow = Literal["exact", "snapshot"]


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
        """Whether a step has run in the pipeline: not if a run resumes at the end of an epoch."""
        return self.strategy(trainer).engine.last_step.record is not None


def check_count(name: str, value: object, least: int) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            expected=f"'{name}' to be an integer of at least {least}",
            found=repr(value),
            remedy="Give a whole number of epochs.",
        )


class StalenessWarmup(PipeCallback):
    """Trains the first epochs exactly, which also fills the histories.

    While weights change fast, stale embeddings are far from fresh ones. The first epoch is always
    exact.

    Args:
        num_epochs: Exact epochs, counted from epoch 0. Take 5, or more for deeper networks; with
            one graph 0 and 1 change nothing.

    Raises:
        ConfigError: If `num_epochs` is negative or not an integer.

    Examples:
        >>> from lightning_gnnpipe import StalenessWarmup
        >>> callback = StalenessWarmup(num_epochs=10)
    """

    @checks_names
    def __init__(self, num_epochs: int) -> None:
        super().__init__()
        check_count("num_epochs", num_epochs, 0)
        self.num_epochs = num_epochs

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.current_epoch < self.num_epochs:
            self.strategy(trainer).controls.is_exact = True


class BoundedStaleness(PipeCallback):
    """Makes every n-th epoch of asynchronous halo exchange synchronous.

    Needs `GNNPipeStrategy(async_halo=True)`. Embeddings of other shards are then fresh once in
    n epochs.

    Source: Sylvie (arXiv 2303.01277), Bounded Staleness Adaptor.

    Args:
        sync_every_n_epochs: Epochs n - 1, 2n - 1, ... are synchronous. Each takes as long as
            without `async_halo`.

    Raises:
        ConfigError: If `sync_every_n_epochs` is not an integer of at least 1, or, once it is used,
            if the strategy has no `async_halo`.

    Examples:
        >>> from lightning_gnnpipe import BoundedStaleness
        >>> callback = BoundedStaleness(sync_every_n_epochs=10)
    """

    @checks_names
    def __init__(self, sync_every_n_epochs: int) -> None:
        super().__init__()
        check_count("sync_every_n_epochs", sync_every_n_epochs, 1)
        self.sync_every_n_epochs = sync_every_n_epochs

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not self.strategy(trainer).options.async_halo:
            raise ConfigError(
                expected="async_halo=True with BoundedStaleness",
                found="async_halo=False, so shards wait for each other in every epoch already",
                remedy="Use GNNPipeStrategy(graph_parallel=2, async_halo=True), or remove the "
                "callback.",
            )

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if (trainer.current_epoch + 1) % self.sync_every_n_epochs == 0:
            self.strategy(trainer).controls.is_synchronous = True


class EmbeddingRefresh(PipeCallback):
    """Renews the embeddings that stale reads return, every n epochs.

    With `how="exact"`, all histories are computed anew before every n-th epoch, with the
    present weights and without dropout. They come from the validation that has just run, if it ran
    on the training graph with the same weights, and cost nothing then. Without such a validation,
    with norms over all nodes or with `async_halo`, each refresh costs one more exact forward pass.

    With `how="snapshot"`, stale reads return a copy of all embeddings, taken after every n-th epoch
    and every exact one. The copy takes as much memory as the histories.

    Source: GNNPipe (arXiv 2308.10087), technique 2, for "snapshot"; the paper's n is 23.

    Args:
        every_n_epochs: Epochs from one refresh to the next. Take 1 with a validation after every
            epoch. With norms over all nodes leave the callback out. Epoch 0 needs none.
        how: "exact" or "snapshot".

    Raises:
        ConfigError: If `every_n_epochs` is not a positive integer, or `how` is invalid; once it is
            used, with `data_parallel`, which is for batches of graphs.

    Examples:
        >>> from lightning_gnnpipe import EmbeddingRefresh
        >>> callback = EmbeddingRefresh(every_n_epochs=10)
    """

    @checks_names
    def __init__(self, every_n_epochs: int, how: RefreshHow = "exact") -> None:
        super().__init__()
        check_count("every_n_epochs", every_n_epochs, 1)
        if how not in get_args(RefreshHow):
            raise ConfigError(
                expected="'how' of EmbeddingRefresh to be 'exact' or 'snapshot'",
                found=repr(how),
                remedy="'exact' computes all embeddings again, 'snapshot' keeps a copy of them.",
            )
        self.every_n_epochs, self.how = every_n_epochs, how

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        setting = self.strategy(trainer).options.for_graphs
        if setting:
            raise ConfigError(
                expected="EmbeddingRefresh to be used with stale embeddings",
                found=f"{setting}: none is ever stale",
                remedy=f"Remove the callback, or leave out {setting}.",
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_due = self.how == "exact" and self._is_due(trainer.current_epoch + 1)
        if is_due and not trainer.sanity_checking:
            self.strategy(trainer).controls.takes_validation = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        controls = self.strategy(trainer).controls
        if self.how == "exact" and batch_idx == 0 and self._is_due(trainer.current_epoch):
            controls.refreshes = True
        elif self.how == "snapshot":
            controls.reads_snapshot = True
            if self._is_due(trainer.current_epoch + 1):  # in each step: inputs may take turns
                controls.takes_snapshot = True

    def _is_due(self, epoch: int) -> bool:
        return epoch > 0 and epoch % self.every_n_epochs == 0
