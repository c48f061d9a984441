"""When shards of the graph wait for each other, and with how many bits they speak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_gnnpipe.callbacks.access import check_count, has_trained, logged_value, pipe_strategy
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.types import CodecName, CodecOption, names_codecs


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

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        controls = pipe_strategy(self, trainer).controls
        controls.is_synchronous = (trainer.current_epoch + 1) % self.sync_every_n_epochs == 0


class AdaptiveHalo(Callback):
    """Lets shards wait for each other, and then send more bits, when the loss stalls.

    Training begins as the strategy says. Whenever a logged metric has not fallen for some epochs,
    the next of these steps is taken: synchronous exchange, then each of `codecs` in turn.

    Source: after the adaptive version of Sylvie (ICDE 2024), which watches the loss.

    Args:
        monitor: Name of a logged metric that should fall.
        patience: Epochs without a fall after which a step is taken.
        min_delta: Least change, as a share of the best value, that counts as a fall.
        codecs: Of rows between shards and their gradients, as the strategy's `halo_codec`; from the
            first step after synchronous exchange on.

    Raises:
        ConfigError: If an argument cannot be right.

    Example:
        >>> from lightning_gnnpipe import AdaptiveHalo
        >>> callback = AdaptiveHalo(monitor="train_loss", patience=5)
    """

    def __init__(
        self,
        monitor: str = "train_loss",
        patience: int = 5,
        min_delta: float = 1e-3,
        codecs: Sequence[CodecOption] = ("int4", "int8", "fp32"),
    ) -> None:
        super().__init__()
        check_count("patience", patience, 1)
        unknown = [one for one in codecs if not names_codecs(one)]
        if unknown:
            known = ", ".join(get_args(CodecName))
            raise ConfigError(
                explain(
                    expected=f"'codecs' to be among {known}, or pairs of them",
                    found=", ".join(map(repr, unknown)),
                    remedy="Leave it at its default, for instance.",
                )
            )
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.codecs = tuple(codecs)
        self.num_steps = 0
        self.best = math.inf
        self.num_stalled = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pipe_strategy(self, trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.num_steps == 0:
            return
        controls = pipe_strategy(self, trainer).controls
        controls.is_synchronous = True
        if self.num_steps > 1:
            controls.halo_codec = self.codecs[self.num_steps - 2]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not has_trained(self, trainer):
            return
        value = logged_value(self, trainer, self.monitor)
        has_fallen = self.best == math.inf or value < self.best - self.min_delta * abs(self.best)
        self.best = min(self.best, value)
        self.num_stalled = 0 if has_fallen else self.num_stalled + 1
        if self.num_stalled >= self.patience and self.num_steps <= len(self.codecs):
            self.num_steps, self.num_stalled = self.num_steps + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "best": self.best,
            "num_stalled": self.num_stalled,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps, self.best = state_dict["num_steps"], state_dict["best"]
        self.num_stalled = state_dict["num_stalled"]
