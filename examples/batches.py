"""Train and test on mini-batches of graphs: the options, the Trainer and the table of results."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from rich.table import Table
from torch_geometric.loader import DataLoader

from lightning_gnnpipe.models import GraphClassifier

NUM_UNTIMED_STEPS = 2
"""Steps after a start that do not count for the time a step takes."""


def build_parser(description: str) -> argparse.ArgumentParser:
    """Return the options that examples with mini-batches of graphs share."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--norm", choices=["layer", "batch"], default="layer", help="norms (default: layer)")
    add("--batch-size", type=int, default=64, help="graphs in a mini-batch (default: 64)")
    add("--epochs", type=int, default=10, help="epochs (default: 10)")
    add("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("outputs"), help="folder of the checkpoints")
    return parser


def train_and_report(
    title: str,
    module: GraphClassifier,
    splits: tuple[Any, Any, Any],
    options: argparse.Namespace,
    strategy: Strategy | str = "auto",
) -> None:
    """Fit, test with the weights of the best validation metric, and print the table."""
    train, val, test = (
        DataLoader(graphs, options.batch_size, shuffle=graphs is splits[0]) for graphs in splits
    )
    timer = StepTimer()
    best = ModelCheckpoint(
        options.output / "checkpoints",
        monitor=f"val_{module.metric}",
        mode="max",
        enable_version_counter=False,
    )
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        strategy=strategy,
        max_epochs=options.epochs,
        callbacks=[best, timer],
        logger=False,
        enable_model_summary=False,
        default_root_dir=options.output,
    )
    trainer.fit(module, train, val)
    [metrics] = trainer.test(module, test, ckpt_path="best", verbose=False)
    report(title, module, [len(graphs) for graphs in splits], timer, metrics)


def report(
    title: str,
    module: GraphClassifier,
    counts: list[int],
    timer: StepTimer,
    metrics: dict[str, float] | Any,
) -> None:
    table = Table(title=title, show_header=False)
    add = table.add_row
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    add("parameters", f"{num_parameters:,}")
    add("graphs to train on, validate on, test on", ", ".join(f"{count:,}" for count in counts))
    add("seconds a training step, median", f"{timer.median_s():.3f}")
    add("seconds of training steps in all", f"{sum(timer.steps_s):.1f}")
    name = {"acc": "test accuracy", "auroc": "test area under the ROC curve"}[module.metric]
    add(name, f"{metrics[f'test_{module.metric}']:.1%}")
    Console().print(table)


class StepTimer(L.Callback):
    """Time each training step: forward, backward and optimizer, not the loading of graphs."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self._start_s = 0.0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._start_s = time.perf_counter()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps_s.append(time.perf_counter() - self._start_s)

    def median_s(self) -> float:
        return statistics.median(self.steps_s[NUM_UNTIMED_STEPS:] or self.steps_s)
