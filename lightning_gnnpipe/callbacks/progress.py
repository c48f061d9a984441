"""Progress within a step: an epoch over the whole graph is one long batch."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_gnnpipe.callbacks.access import PipeCallback

_INTERVAL_S = 0.1


class ChunkProgress(PipeCallback):
    """Shows on the progress bar how many chunks of the step the first rank has computed.

    The bar reads `Epoch 3 forward 5/16`, then `Epoch 3 backward 12/16`, updated at most ten times a
    second. Works with Lightning's TQDM and Rich bars; any other bar stays unchanged.

    Example:
        >>> from lightning_gnnpipe import ChunkProgress
        >>> callback = ChunkProgress()
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar: ProgressBar | None = None
        self._label = ""
        self._shown_s = 0.0
        self._has_phases = True  # all forwards run before all backwards

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        bar = trainer.progress_bar_callback
        if trainer.is_global_zero and isinstance(bar, TQDMProgressBar | RichProgressBar):
            self._bar = bar if bar.is_enabled else None
        if self._bar is not None:
            self._label = _description(self._bar)
            self._has_phases = self.strategy(trainer).options.schedule == "fill_drain"
            self._shown_s = 0.0
            self.strategy(trainer).controls.on_chunk = self._show

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._bar is not None:
            _describe(self._bar, self._label)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._bar = None

    def _show(self, num_done: int, num_total: int) -> None:
        now_s = time.monotonic()
        if self._bar is None or now_s - self._shown_s < _INTERVAL_S:
            return
        self._shown_s = now_s
        text, half = f"{num_done}/{num_total}", num_total // 2
        if self._has_phases:
            is_back = num_done > half
            text = f"backward {num_done - half}/{half}" if is_back else f"forward {num_done}/{half}"
        _describe(self._bar, f"{self._label.rstrip()} {text}")


def _description(bar: ProgressBar) -> str:
    """Return the text in front of the training bar."""
    if isinstance(bar, TQDMProgressBar):
        return bar.train_progress_bar.desc.removesuffix(": ")
    if isinstance(bar, RichProgressBar) and bar.train_progress_bar_id is not None:
        return bar.train_progress_bar.description
    return ""


def _describe(bar: ProgressBar, text: str) -> None:
    """Set the text in front of the training bar."""
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.set_description(text)
    elif isinstance(bar, RichProgressBar):
        task = bar.train_progress_bar_id
        if bar.progress is not None and task is not None:
            bar.progress.update(task, description=text)
            bar.refresh()
