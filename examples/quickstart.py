"""Train a deep GCNII on one graph plainly, on one device, and in a pipeline.

    python examples/quickstart.py
    python examples/quickstart.py --dataset Cora --root DIR --layers 64 --channels 64 --chunks 16

The ways are a plain Trainer with as many cores as the pipeline has, the strategy on one device with
one chunk, with one core and with as many, and the strategy in stages.
Prints what each reached and what the pipeline cost, and draws the pipeline's last training step in
OUTPUT/timeline_epoch_<e>.png. The script is run once by you and once more by Lightning for every
further process of the pipeline; only the process that you started trains on one device.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread a stage

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from graphs import load_graph
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import silence_lightning
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_gnnpipe import (
    EmbeddingRefresh,
    FullGraphDataModule,
    GNNPipeStrategy,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.chunks import PipelineStats, num_cores, uses_glibc_malloc
from lightning_gnnpipe.graph import partition_nodes
from lightning_gnnpipe.graph.partition import remote_reads
from lightning_gnnpipe.models import GCNII, NodeClassifier
from lightning_gnnpipe.planning.closed_forms import graph_parallel_bytes, pipeline_bytes

FLOAT_BYTES = 4
NUM_EXACT_EPOCHS = 5
NUM_UNTIMED_EPOCHS = 2
"""Epochs after a start or a change of schedule that do not count for the time an epoch takes."""


@dataclass(frozen=True)
class Result:
    """What a run reached, and how long its training steps took."""

    test_acc: float
    steps_s: list[float]
    stats: PipelineStats | None = None
    picture: Path | None = None


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    silence_lightning()
    datamodule = FullGraphDataModule(load_graph(options.dataset, options.root), seed=options.seed)

    is_launched = "LOCAL_RANK" in os.environ  # by Lightning or torchrun, as a part of the pipeline
    exact: list[Result] = []
    for name, num_threads in (
        () if is_launched else (("plain", options.cores), ("one", 1), ("all", options.cores))
    ):
        strategy = "auto" if name == "plain" else GNNPipeStrategy(num_chunks=1)
        torch.set_num_threads(num_threads)
        way = "in a plain Trainer" if name == "plain" else "on one device"
        print(f"Training {way}, threads: {num_threads} ...", flush=True)
        exact.append(train_exactly(name, strategy, datamodule, options))
    torch.set_num_threads(1)
    pipeline, is_first_rank = train_pipeline(datamodule, options)
    if is_first_rank:
        report(exact, pipeline, datamodule, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--dataset", default="communities", help="communities, digits, Cora, ogbn-arxiv, ...")
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--layers", type=int, default=16, help="message-passing layers (default: 16)")
    add("--channels", type=int, default=256, help="channels of each layer (default: 256)")
    add("--stages", type=int, default=2, help="stages, one process each (default: 2)")
    add("--cores", type=int, help="of the runs on one device (default: one a stage)")
    add("--chunks", type=int, help="chunks of the graph (default: 4 a stage)")
    add("--epochs", type=int, default=12, help="epochs of each run (default: 12)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("outputs"), help="folder of the results")
    options = parser.parse_args()
    if options.cores is None:
        options.cores = min(options.stages, num_cores())
    if options.chunks is None:
        options.chunks = 4 * options.stages
    shortest = NUM_EXACT_EPOCHS + NUM_UNTIMED_EPOCHS + 1
    if options.epochs < shortest:
        parser.error(
            f"--epochs must be at least {shortest}: the first {NUM_EXACT_EPOCHS} are exact"
        )
    return options


def train_exactly(
    name: str,
    strategy: str | GNNPipeStrategy,
    datamodule: FullGraphDataModule,
    options: argparse.Namespace,
) -> Result:
    """Train on one device, by a plain Trainer or in one chunk."""
    timer = EpochTimer()
    trainer = build_trainer(name, options, [timer], devices=1, strategy=strategy)
    test_acc = fit_and_test(trainer, datamodule, options)
    return Result(test_acc, timer.epochs_s[NUM_UNTIMED_EPOCHS:])


def train_pipeline(
    datamodule: FullGraphDataModule, options: argparse.Namespace
) -> tuple[Result, bool]:
    """Train the same module in stages; say whether this process is the first of them."""
    timer, step_stats = EpochTimer(), StepStats()
    timeline = TimelineCallback(dirpath=options.output)
    trainer = build_trainer(
        "pipeline",
        options,
        [
            StalenessWarmup(num_epochs=NUM_EXACT_EPOCHS),
            EmbeddingRefresh(every_n_epochs=1),
            StalenessMonitor(),
            timer,
            step_stats,
            timeline,
        ],
        devices=options.stages,
        strategy=GNNPipeStrategy(num_chunks=options.chunks),
    )
    test_acc = fit_and_test(trainer, datamodule, options)
    steps_s = timer.epochs_s[NUM_EXACT_EPOCHS + NUM_UNTIMED_EPOCHS :]
    result = Result(test_acc, steps_s, step_stats.stats, timeline.png_path)
    return result, trainer.is_global_zero


def build_trainer(
    name: str, options: argparse.Namespace, callbacks: list[L.Callback], **kwargs: Any
) -> L.Trainer:
    best = ModelCheckpoint(
        options.output / "checkpoints" / name,
        monitor="val_acc",
        mode="max",
        enable_version_counter=False,
    )
    return L.Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        callbacks=[best, *callbacks],
        logger=False,
        enable_model_summary=False,
        default_root_dir=options.output,
        **kwargs,
    )


def build_module(datamodule: FullGraphDataModule, options: argparse.Namespace) -> NodeClassifier:
    """Return the same module, with the same initial weights, in every process and run."""
    L.seed_everything(options.seed, verbose=False)
    num_classes = datamodule.num_classes
    net = GCNII(datamodule.num_features, options.channels, num_classes, options.layers)
    return NodeClassifier(net, num_classes)


def fit_and_test(
    trainer: L.Trainer, datamodule: FullGraphDataModule, options: argparse.Namespace
) -> float:
    """Fit, then return the test accuracy of the weights of the best validation accuracy."""
    module = build_module(datamodule, options)
    trainer.fit(module, datamodule=datamodule)
    [metrics] = trainer.test(module, datamodule=datamodule, ckpt_path="best", verbose=False)
    return metrics["test_acc"]


class EpochTimer(L.Callback):
    """Time the training step of each epoch (forward, backward, optimizer), without validation."""

    def __init__(self) -> None:
        self.epochs_s: list[float] = []
        self._start_s = 0.0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._start_s = time.perf_counter()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.epochs_s.append(time.perf_counter() - self._start_s)


class StepStats(L.Callback):
    """Keep bytes and bubble share of the last training step; all ranks take part."""

    stats: PipelineStats | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, GNNPipeStrategy)
        self.stats = trainer.strategy.collect_stats()


def report(
    exact: list[Result],
    pipeline: Result,
    datamodule: FullGraphDataModule,
    options: argparse.Namespace,
) -> None:
    """Print the table, and where the timeline was drawn."""
    stats, num_stages, num_chunks = pipeline.stats, options.stages, options.chunks
    assert stats is not None
    runs = [*(exact or 3 * [Result(float("nan"), [float("nan")])]), pipeline]
    kinds = ("forward", "backward", "output", "weight_grad")
    measured_bytes = sum(stats.bytes_by_kind.get(kind, 0) for kind in kinds)
    row_bytes = options.channels * FLOAT_BYTES * (num_stages - 1)
    is_repeated = stats.bytes_by_kind["forward"] == datamodule.data.num_nodes * row_bytes
    formula_bytes = count_pipeline_bytes(datamodule, options, is_repeated=is_repeated)
    graph_bytes = count_graph_parallel_bytes(datamodule, options)
    bubble_frac = (num_stages - 1) / (num_chunks + num_stages - 1)

    graph = datamodule.data
    table = Table(
        title=f"GCNII, {options.layers} layers of {options.channels} channels, "
        f"on {options.dataset} ({graph.num_nodes:,} nodes, {graph.num_edges:,} edges), "
        f"{options.epochs} epochs"
    )
    table.add_column("")
    table.add_column("plain\nTrainer", justify="right")
    for _ in range(2):
        table.add_column("one device,\none chunk", justify="right")
    table.add_column(f"pipeline\n{num_stages} stages,\n{num_chunks} chunks", justify="right")
    add = table.add_row
    cores = f"{options.cores}"
    add("threads", cores, "1", cores, " + ".join(["1"] * num_stages))
    add("test accuracy", *(f"{run.test_acc:.1%}" for run in runs))
    add("seconds a step", *(f"{statistics.median(run.steps_s):.3f}" for run in runs))
    add("least, most", *(f"{min(run.steps_s):.2f}, {max(run.steps_s):.2f}" for run in runs))
    add("bytes measured", "0", "0", "0", f"{measured_bytes:,}")
    add("bytes by formula", "0", "0", "0", f"{formula_bytes:,}")
    add("bytes of graph\nparallelism", "", "", "", f"{graph_bytes:,}")
    add("idle share", "", "", "", f"{stats.bubble_frac:.1%}")
    add("idle at best", "", "", "", f"{bubble_frac:.1%}")

    console = Console()
    console.print(table)
    if uses_glibc_malloc():
        console.print(
            "Linux's malloc slows the plain Trainer most. To compare without it, write "
            "LD_PRELOAD=libtcmalloc_minimal.so.4 before the command."
        )
    console.print(f"One training step of the pipeline, drawn from its trace: {pipeline.picture}")


def count_pipeline_bytes(
    datamodule: FullGraphDataModule, options: argparse.Namespace, *, is_repeated: bool
) -> int:
    """Return what a step sends by formula: of GCNII x and x_0 cross each cut.

    Where the stages compute x_0 again (`is_repeated`) x does alone; they sum the gradients of the
    linear map that makes x_0. With each gradient of a weight goes a number: whether there is one.
    """
    net, num_cuts = build_module(datamodule, options).net, options.stages - 1
    encoder = [p for n, p in net.named_parameters() if is_repeated and n.startswith("lin_in.")]
    num_tensors = 1 if is_repeated else 2
    return pipeline_bytes(
        num_nodes=datamodule.data.num_nodes,
        row_bytes=[num_tensors * options.channels * FLOAT_BYTES] * num_cuts,
        output_row_bytes=datamodule.num_classes * FLOAT_BYTES,
        weight_bytes=sum(p.numel() + 1 for p in net.parameters()) * FLOAT_BYTES,
        tied_bytes=sum(p.numel() + 1 for p in encoder) * FLOAT_BYTES,
    )


def count_graph_parallel_bytes(datamodule: FullGraphDataModule, options: argparse.Namespace) -> int:
    """Return what a step would send if each process had a part of the graph and all layers."""
    edge_index: Tensor = datamodule.data.edge_index
    num_nodes: int = datamodule.data.num_nodes
    parts = partition_nodes(edge_index, num_nodes, num_chunks=options.stages, method="metis")
    module: nn.Module = build_module(datamodule, options)
    return graph_parallel_bytes(
        num_layers=options.layers,
        replicas_per_node=remote_reads(edge_index, parts)[0].numel() / num_nodes,
        num_nodes=num_nodes,
        row_bytes=options.channels * FLOAT_BYTES,
        weight_bytes=FLOAT_BYTES * sum(weight.numel() for weight in module.parameters()),
        num_shards=options.stages,
    )


if __name__ == "__main__":
    main()
