"""One training step as a picture, one row per rank, time to the right.

    rank 0  |F2|F0|F3|F1|#####|      |#####|B1|B3|B0|B2|
    rank 1  |##|F2|F0|F3|F1|   loss   |B1|B3|B0|B2|####|

Idle time within a phase is grey; time between the phases (outputs, loss) is white.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lightning_gnnpipe.callbacks.staleness import PipeCallback, check_count
from lightning_gnnpipe.chunks import PipelineStats, TraceEvent, phases
from lightning_gnnpipe.errors import checks_names, explain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_KEY = "pipe/timeline"
FORWARD, BACKWARD, IDLE = "#4477aa", "#c8553d", "#d5d5d5"
_COLOURS = {"forward": FORWARD, "backward": BACKWARD, "idle (bubble)": IDLE}
_LEAST_INCHES, _MOST_INCHES = 12.0, 26.0  # width
_DIGIT_INCHES = 0.075  # of a number in a box
_HEIGHT = 0.84  # of a row
_CENTRED: Any = {"ha": "center", "va": "center", "size": 7}


class TimelineCallback(PipeCallback):
    """Draws the last training step of an epoch: the chunks and the waits of each rank over time.

    Writes `timeline_epoch_<e>.png`, one row per rank. TensorBoard and Weights & Biases get it as
    `pipe/timeline`. `Trainer(profiler="pytorch")` shows the same chunks among torch's operations.

    Args:
        epoch: The epoch, from 0; None for the last one of the run.
        dirpath: Folder of the picture; None for the folder of the logger, or the Trainer's.

    Attributes:
        png_path: Path of the picture, once written; on the first rank.

    Raises:
        ConfigError: If `epoch` is neither None nor an integer of at least 0.
        ImportError: Without matplotlib.

    Examples:
        >>> from lightning_gnnpipe import TimelineCallback
        >>> callback = TimelineCallback(epoch=20)
    """

    @checks_names
    def __init__(self, epoch: int | None = None, dirpath: str | Path | None = None) -> None:
        super().__init__()
        if epoch is not None:
            check_count("epoch", epoch, 0)
        if find_spec("matplotlib") is None:
            raise ImportError(
                explain(
                    expected="the package 'matplotlib' to be installed, to draw a timeline",
                    found="no such package",
                    remedy="Run: pip install matplotlib",
                )
            )
        self.epoch = epoch
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.png_path: Path | None = None
        self._last_epoch: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._last_epoch = None
        is_late = self.epoch is not None and 0 <= (trainer.max_epochs or -1) <= self.epoch
        if stage == "fit" and is_late and trainer.is_global_zero:
            text = "No timeline will be drawn of epoch %d: the run has max_epochs=%d."
            log.warning(text, self.epoch, trainer.max_epochs)

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
            log.warning(
                "No timeline was drawn: no step of epoch %d ran in the pipeline.", self.epoch
            )

    def _write(self, trainer: pl.Trainer, epoch: int) -> None:
        """Draw the step and send the picture to the loggers; a collective call."""
        stats = self.strategy(trainer).collect_stats()
        folder = self.dirpath or Path(trainer.log_dir or trainer.default_root_dir)
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        figure = draw_timeline(stats.events, f"Epoch {epoch}: {describe_step(stats)}")
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


def describe_step(stats: PipelineStats) -> str:
    """Return one line about the step, with its idle share.

    At best that share is (S - 1) / (K + S - 1), with equal costs and free transfers.
    """
    stages, chunks = stats.num_stages, stats.num_chunks
    least = (stages - 1) / (chunks + stages - 1)
    kind = "exact step" if stats.is_exact else f"{chunks} chunk{'s' if chunks > 1 else ''}"
    replicas = f"{stats.num_replicas} replicas of " if stats.num_replicas > 1 else ""
    return (
        f"{replicas}{stages} stage{'s' if stages > 1 else ''}, {kind}, bubble share "
        f"{stats.bubble_frac:.1%} (at best {least:.1%})"
    )


def draw_timeline(events: Sequence[TraceEvent], title: str) -> Figure:
    """Return a picture of `events`, wide enough for the numbers of most chunks."""
    from matplotlib.figure import Figure

    start, end = min(e.start_us for e in events), max(e.end_us for e in events)
    num_ranks = max(e.rank for e in events) + 1
    widths_us = sorted(event.end_us - event.start_us for event in events)
    usual_us = max(widths_us[len(widths_us) // 5], 1e-9)  # four in five are at least as wide
    digits = max(len(str(event.chunk)) for event in events)
    needed = _DIGIT_INCHES * (digits + 1) / usual_us * (end - start)
    width = min(max(needed, _LEAST_INCHES), _MOST_INCHES)
    figure = Figure(figsize=(width, 1.7 + 0.55 * num_ranks), layout="constrained")
    axes = figure.subplots()
    _draw_phases(axes, events, num_ranks)
    for event in events:
        left, length = event.start_us / 1e3, (event.end_us - event.start_us) / 1e3
        place = event.rank - _HEIGHT / 2, _HEIGHT
        colour = _COLOURS[event.phase]
        axes.broken_barh([(left, length)], place, fc=colour, ec="white", linewidth=0.5)
        text = str(event.chunk)
        if _DIGIT_INCHES * len(text) <= 1e3 * length / (end - start) * width:
            axes.text(left + length / 2, event.rank, text, color="white", **_CENTRED)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_xlim(start / 1e3, end / 1e3)
    axes.set_xlabel("time in the training step [ms]; the number in a box is its chunk")
    axes.set_title(title, loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_legend(figure)
    return figure


def _draw_phases(axes: Axes, events: Sequence[TraceEvent], num_ranks: int) -> None:
    """Draw the idle background of both phases, and name what lies between them."""
    spans = phases(events)
    for rank in range(num_ranks):
        bars: Any = [(start / 1e3, (end - start) / 1e3) for start, end in spans]
        axes.broken_barh(bars, (rank - _HEIGHT / 2, _HEIGHT), color=IDLE, linewidth=0)
    if len(spans) == 2 and spans[1][0] > spans[0][1]:
        middle_ms = (spans[0][1] + spans[1][0]) / 2e3
        above = axes.get_xaxis_transform()  # the gap may be narrow
        axes.text(middle_ms, 1.04, "outputs, loss", transform=above, color="#666666", **_CENTRED)


def _draw_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for label, colour in _COLOURS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower right", frameon=False)
