"""Train and test on mini-batches of graphs: the options, the Trainer, the table of results."""

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

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.models import GraphClassifier

METRICS = {"acc": "test accuracy", "auroc": "test area under the ROC curve"}
NUM_UNTIMED_STEPS = 2
"""Steps after a start that do not count for the time a step takes."""


def build_parser(description: str) -> argparse.ArgumentParser:
    """Return the options that examples with mini-batches of graphs share."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--stages", type=int, default=1, help="stages, one process each (default: 1, no pipeline)")
    add("--data-parallel", type=int, default=1, help="replicas, each on batches of its own")
    add("--micro-batches", type=int, help="of each mini-batch (default: 4 a stage)")
    add("--norm", choices=["layer", "batch"], default="layer", help="norms (default: layer)")
    add("--batch-size", type=int, default=64, help="graphs in a mini-batch of a replica")
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
) -> None:
    """Fit, test with the weights of the best validation metric, and print the table.

    With several processes this script runs once more for each further one, as the quickstart does.
    """
    train, val, test = (
        DataLoader(graphs, options.batch_size, shuffle=graphs is splits[0]) for graphs in splits
    )
    num_parameters = sum(weight.numel() for weight in module.parameters())
    timer = StepTimer()
    best = ModelCheckpoint(
        options.output / "checkpoints",
        monitor=f"val_{module.metric}",
        mode="max",
        enable_version_counter=False,
    )
    trainer = L.Trainer(
        accelerator="auto",
        devices=options.stages * options.data_parallel,
        strategy=build_strategy(options),
        max_epochs=options.epochs,
        callbacks=[best, timer],
        logger=False,
        enable_model_summary=False,
        default_root_dir=options.output,
    )
    trainer.fit(module, train, val)
    [metrics] = trainer.test(module, test, ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        table = Table(title=title, show_header=False)
        counts = ", ".join(f"{len(graphs):,}" for graphs in splits)
        table.add_row("graphs to train on, validate on, test on", counts)
        table.add_row("parameters", f"{num_parameters:,}")
        table.add_row("seconds a training step, median", f"{timer.median_s():.3f}")
        table.add_row("seconds of training steps in all", f"{sum(timer.steps_s):.1f}")
        table.add_row(METRICS[module.metric], f"{metrics[f'test_{module.metric}']:.1%}")
        Console().print(table)


def build_strategy(options: argparse.Namespace) -> Strategy | str:
    """Return the strategy for the stages; BatchNorm sees a micro-batch at a time there."""
    if options.stages * options.data_parallel == 1 and options.micro_batches is None:
        return "auto"
    return GNNPipeStrategy(
        data_parallel=options.data_parallel,
        num_chunks=options.micro_batches or "auto",
    )


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
