"""One training step as a picture and as a trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lightning_gnnpipe.callbacks.access import PipeCallback, check_count
from lightning_gnnpipe.report import check_matplotlib, chrome_trace, draw_timeline, timeline_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_KEY = "pipe/timeline"


class TimelineCallback(PipeCallback):
    """Draws the last training step of an epoch: the chunks and the waits of each rank over time.

    Writes `timeline_epoch_<e>.png`, one row per rank, and `timeline_epoch_<e>.json`, a trace for
    https://ui.perfetto.dev or chrome://tracing. TensorBoard and Weights & Biases get the picture as
    `pipe/timeline`.

    Args:
        epoch: The epoch, from 0; None for the last one of the run.
        dirpath: Folder of the files; None for the folder of the logger, or the Trainer's.

    Attributes:
        png_path: Path of the picture, once written; on the first rank.
        trace_path: Path of the trace, likewise.

    Raises:
        ConfigError: If `epoch` is neither None nor an integer of at least 0.
        ImportError: Without matplotlib.

    Example:
        >>> from lightning_gnnpipe import TimelineCallback
        >>> callback = TimelineCallback(epoch=20)
    """

    def __init__(self, epoch: int | None = None, dirpath: str | Path | None = None) -> None:
        super().__init__()
        if epoch is not None:
            check_count("epoch", epoch, 0)
        check_matplotlib()
        self.epoch = epoch
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.png_path: Path | None = None
        self.trace_path: Path | None = None
        self._last_epoch: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._last_epoch = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.has_trained(trainer):
            return
        self._last_epoch = trainer.current_epoch
        if trainer.current_epoch == self.epoch:
            self._write(trainer, self.epoch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.epoch is None and self._last_epoch is not None:
            self._write(trainer, self._last_epoch)
        elif self.png_path is None and trainer.is_global_zero and self.epoch is not None:
            log.warning("No timeline was drawn: this run trained no step of epoch %d.", self.epoch)

    def _write(self, trainer: pl.Trainer, epoch: int) -> None:
        """Write both files and send the picture to the loggers; a collective call."""
        stats = self.strategy(trainer).collect_stats()
        folder = self.dirpath or Path(trainer.log_dir or trainer.default_root_dir)
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        title = timeline_title(stats, epoch)
        self.trace_path = folder / f"timeline_epoch_{epoch}.json"
        self.trace_path.write_text(json.dumps(chrome_trace(stats, f"training step, epoch {epoch}")))
        figure = draw_timeline(stats.events, title)
        self.png_path = folder / f"timeline_epoch_{epoch}.png"
        figure.savefig(self.png_path, dpi=150)
        _send(trainer.loggers, figure, self.png_path, trainer.global_step)


def _send(loggers: Iterable[Logger], figure: Figure, path: Path, step: int) -> None:
    """Send the picture to the loggers that take pictures."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            writer: Any = logger.experiment
            writer.add_figure(_KEY, figure, global_step=step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(_KEY, [str(path)], step=step)
