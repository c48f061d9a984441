"""The table of stages, shown where Lightning shows its model summary."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from torch import nn

from lightning_gnnpipe.report import describe_stages, format_stages
from lightning_gnnpipe.stages import Stage


def shows_stages(trainer: pl.Trainer) -> bool:
    """Whether the table is to be shown here: on the first rank, unless summaries are off."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return trainer.is_global_zero and any(isinstance(one, ModelSummary) for one in callbacks)


def print_stages(
    trainer: pl.Trainer,
    pipelined: nn.Module,
    stages: Sequence[Stage],
    users: Mapping[str, set[int]],
    costs: Sequence[float],
) -> None:
    """Print the table without breaking the progress bar; see `describe_stages`."""
    rows = describe_stages(trainer.lightning_module, pipelined, stages, users, costs)
    text = format_stages(rows, shutil.get_terminal_size().columns)
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.print(text)
    else:
        trainer.print(text)
