"""Callbacks that log figures of a step: staleness, time, bytes, memory."""

from __future__ import annotations

import time
from typing import Any, get_args

import lightning.pytorch as pl
import torch

from lightning_gnnpipe.callbacks.staleness import PipeCallback, check_count
from lightning_gnnpipe.errors import checks_names
from lightning_gnnpipe.staleness import Staleness
from lightning_gnnpipe.types import TrafficKind

_MIB = 2**20


class StalenessMonitor(PipeCallback):
    """Logs how stale the reads of an epoch's last training step were.

    Keys: `history/stale_frac` (stale share of the embeddings read from other chunks: about a half,
    0 in exact epochs),
    `history/age_epochs` (their mean age), `history/drift` and `history/drift/layer_<i>`
    (|H_stale - H_fresh| / |H_fresh| over the embeddings that the epoch rewrote, dropout included).
    The drift costs one more read of every history.

    Args:
        every_n_epochs: Measure and log the last of every n epochs.

    Raises:
        ConfigError: If `every_n_epochs` is not a positive integer.

    Examples:
        >>> from lightning_gnnpipe import StalenessMonitor
        >>> callback = StalenessMonitor()
    """

    @checks_names
    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        check_count("every_n_epochs", every_n_epochs, 1)
        self.every_n_epochs = every_n_epochs

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if _is_due(trainer, self.every_n_epochs):
            self.strategy(trainer).controls.records_staleness = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _is_due(trainer, self.every_n_epochs) or not self.has_trained(trainer):
            return
        layers = self.strategy(trainer).collect_staleness()
        total = Staleness()
        for one in layers.values():
            total.add(one)
        values = {
            "history/stale_frac": total.stale_rows / total.rows if total.rows else 0.0,
            "history/age_epochs": total.age_sum / total.stale_rows if total.stale_rows else 0.0,
            "history/drift": total.drift,
        }
        values |= {f"history/drift/layer_{layer}": one.drift for layer, one in layers.items()}
        pl_module.log_dict(values, batch_size=1, sync_dist=True)


class PipelineMonitor(PipeCallback):
    """Logs time, waits, bytes and memory of the pipeline.

    All figures are from the epoch's last training step, and equal on all ranks. Keys:

    - `pipe/step_s`: seconds of the step, optimizer included, on the first rank, which finishes its
      backward phase last.
    - `pipe/bubble_frac`: share of the stages' time, forward and backward phase, in which they did
      not compute. A phase lasts from the start of its first chunk to the end of its last, on any
      stage.
    - `pipe/wait_s/stage_<s>`: seconds of the two phases in which stage s did not compute: it
      waited, sent, or was done. Their mean over the length of the phases is the bubble share.
    - `pipe/bytes/<kind>`: payload bytes that all ranks received: `forward` and `backward` between
      stages, `halo` and `halo_grad` between shards, `output`, `input_grad`,
      `weight_grad` (of weights), `data_grad` (over replicas), and `control`, which is no payload
      of the step.
    - `pipe/peak_memory_mib/stage_<s>`: peak memory so far: allocated by torch on a GPU, else
      resident memory of the process, with Python and the data set.
    - With shards, `stage_<s>` becomes `stage_<s>_shard_<g>`; with replicas,
      `replica_<r>_stage_<s>`.

    Every step records its events. Only a logged epoch exchanges them. On a GPU it also synchronizes
    its steps, and chunks count as computed once they are launched.

    Args:
        every_n_epochs: Log the last of every n epochs.

    Raises:
        ConfigError: If `every_n_epochs` is not a positive integer.

    Examples:
        >>> from lightning_gnnpipe import PipelineMonitor
        >>> callback = PipelineMonitor(every_n_epochs=5)
    """

    @checks_names
    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        check_count("every_n_epochs", every_n_epochs, 1)
        self.every_n_epochs = every_n_epochs
        self._start_s = 0.0
        self._step_s = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._start_s = self._now_s(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._step_s = self._now_s(trainer) - self._start_s

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _is_due(trainer, self.every_n_epochs) or not self.has_trained(trainer):
            return
        values = self._collect(trainer)
        # Single precision holds byte counts exactly up to 16 MiB only.
        exact = {name: torch.tensor(one, dtype=torch.float64) for name, one in values.items()}
        pl_module.log_dict(exact, batch_size=1, sync_dist=True)

    def _collect(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return all figures, equal on all ranks; a collective call."""
        strategy = self.strategy(trainer)
        stats = strategy.collect_stats()
        values = {
            "pipe/step_s": strategy.broadcast(self._step_s),
            "pipe/bubble_frac": stats.bubble_frac,
        }
        for kind in get_args(TrafficKind):
            values[f"pipe/bytes/{kind}"] = stats.bytes_by_kind.get(kind, 0)
        figures = zip(stats.rank_names(), stats.wait_s, stats.peak_memory_bytes, strict=True)
        for name, wait_s, peak in figures:
            rank = "_".join(name).replace(" ", "_")
            values[f"pipe/wait_s/{rank}"] = wait_s
            values[f"pipe/peak_memory_mib/{rank}"] = peak / _MIB
        return values

    def _now_s(self, trainer: pl.Trainer) -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda" and _is_due(trainer, self.every_n_epochs):
            torch.cuda.synchronize(device)
        return time.perf_counter()


def _is_due(trainer: pl.Trainer, every_n_epochs: int) -> bool:
    return (trainer.current_epoch + 1) % every_n_epochs == 0
