"""What does it cost to leave out the edges between chunks, as GPipe would, beside histories?

    python examples/benchmarks/dropped_edges/main.py --root DIR

Trains a 2-layer GAT on Cora, CiteSeer and PubMed in 1 to 4 chunks: with the edges between chunks
dropped, and kept by histories. Chunks are runs of node numbers, as where a list of nodes is split
for GPipe, or METIS's. Prints a table, writes it to OUTPUT/accuracy.csv, a picture to
OUTPUT/accuracy.png, and each run to OUTPUT/cells.csv as soon as it is finished; runs that are there
are not made again. All runs of a seed begin with the same weights. One process of one stage trains
what any number of stages would.

Source: Dearing and Wang, Analyzing the Performance of Graph Neural Networks with Pipe Parallelism
(https://arxiv.org/abs/2012.10840), whose micro-batches lose the edges between them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import csv
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))
from common import print_table
from graphs import load_graph
from quiet import silence_lightning

from lightning_gnnpipe import (
    DelayedGradients,
    DropoutFreeRows,
    FullGraphDataModule,
    GNNPipeStrategy,
    StalenessMethod,
    StalenessWarmup,
)
from lightning_gnnpipe.graph import edge_cut_frac, partition_nodes
from lightning_gnnpipe.models import GAT, NodeClassifier
from lightning_gnnpipe.types import PartitionMethod

DATASETS = ("Cora", "CiteSeer", "PubMed")
METHODS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "dropped": {"cross_chunk_edges": "drop"},
    "constant": {"staleness": "constant"},
    "delayed": {"staleness": "delayed"},
    "dropout-free": {"staleness": StalenessMethod(reads=DropoutFreeRows())},
    "delayed, dropout-free": {"staleness": StalenessMethod(DelayedGradients(), DropoutFreeRows())},
}
EVERY = 4  # epochs between two looks at the held-out sets
NUM_LATE = 40  # epochs at the end, of which the mean accuracy is noted as well


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        dataset: Name of the graph.
        partition: How nodes are dealt out to chunks.
        chunks: Chunks, K.
        method: What becomes of edges between chunks: a key of `METHODS`.
        warmup: Exact epochs at the start.
        epochs: Epochs.
        seed: Of weights and dropout; the chunks are the same for all seeds.
    """

    dataset: str
    partition: PartitionMethod
    chunks: int
    method: str
    warmup: int
    epochs: int
    seed: int


class WordDropout(nn.Module):
    """Dropout that draws for the words that a document has; it has few of all there are.

    Args:
        share: Share of them that is zeroed in training.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        words = x.nonzero(as_tuple=True)
        kept = F.dropout(x[words], self.share, self.training)
        return torch.zeros_like(x).index_put(words, kept)


class WordGAT(GAT):
    """GAT on bags of words: the same function of the same random numbers' law, in less time."""

    def __init__(self, in_channels: int, out_channels: int, out_heads: int) -> None:
        super().__init__(in_channels, 8, out_channels, out_heads=out_heads)
        self.words = WordDropout(self.dropout.p)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, last = self.convs
        x = F.elu(first(self.words(x), edge_index))
        return last(self.dropout(x), edge_index)


class Watched(NodeClassifier):
    """Logs the accuracy on both held-out sets in one validation pass."""

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        found = self(batch).argmax(-1) == batch.y
        for name in ("val", "test"):
            share = found[batch[f"{name}_mask"]].double().mean()
            self.log(f"{name}_acc", share, batch_size=1)


class Curves(L.Callback):
    """The accuracy on both held-out sets, one number each time that they are looked at."""

    def __init__(self) -> None:
        self.val: list[float] = []
        self.test: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.val.append(float(trainer.callback_metrics["val_acc"]))
        self.test.append(float(trainer.callback_metrics["test_acc"]))


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    silence_lightning()
    logging.getLogger("lightning_gnnpipe").setLevel(logging.ERROR)  # the table says it
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "cells.csv"
    finished = read_cells(path)
    for cell in () if options.only_report else cells_of(options):
        if cell not in finished:
            finished[cell] = run(cell, options.root)
            write_cell(path, cell, finished[cell])
            print(cell, finished[cell], file=sys.stderr, flush=True)
    rows = summarize(finished)
    write_rows(options.output / "accuracy.csv", rows)
    print_table(list(rows[0]), [[shown(value) for value in row.values()] for row in rows])
    draw(rows, options.output / "accuracy.png")


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the runs that are asked for; one chunk is the same in all partitions."""
    for dataset in options.datasets:
        for seed in options.seeds:
            yield Cell(dataset, "contiguous", 1, "one chunk", 1, options.epochs, seed)
            for partition in options.partitions:
                for chunks in (one for one in options.chunks if one > 1):
                    for method in options.methods:
                        warmup = 1 if method == "dropped" else options.warmup
                        yield Cell(dataset, partition, chunks, method, warmup, options.epochs, seed)


def run(cell: Cell, root: str | None) -> dict[str, float]:
    """Train once; return accuracies in %, the share of edges between chunks, and seconds of CPU."""
    start_s = time.process_time()
    datamodule = FullGraphDataModule(load_graph(cell.dataset, root))
    data = datamodule.data
    assert data.edge_index is not None and data.num_nodes is not None
    partition = partition_nodes(
        data.edge_index, data.num_nodes, num_chunks=cell.chunks, method=cell.partition, seed=0
    )
    L.seed_everything(cell.seed, verbose=False)
    is_pubmed = cell.dataset == "PubMed"  # the GAT paper's settings
    net = WordGAT(data.num_features, datamodule.num_classes, 8 if is_pubmed else 1)
    lr, decay = (0.01, 1e-3) if is_pubmed else (0.005, 5e-4)
    curves = Curves()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(partition=partition, **METHODS[cell.method]),
        max_epochs=cell.epochs,
        callbacks=[curves, StalenessWarmup(num_epochs=cell.warmup)],
        num_sanity_val_steps=0,
        check_val_every_n_epoch=EVERY,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Watched(net, datamodule.num_classes, lr, decay), datamodule=datamodule)
    best = max(range(len(curves.val)), key=curves.val.__getitem__)
    return {
        "test": 100 * curves.test[best],
        "late": 100 * statistics.mean(curves.test[-NUM_LATE // EVERY :]),
        "cut": 100 * edge_cut_frac(data.edge_index, partition),
        "seconds": time.process_time() - start_s,
    }


def read_cells(path: Path) -> dict[Cell, dict[str, float]]:
    """Return the finished runs."""
    if not path.exists():
        return {}
    kinds = {field.name: int if field.type == "int" else str for field in fields(Cell)}
    found = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = {name: kind(row.pop(name)) for name, kind in kinds.items()}
            found[Cell(**values)] = {name: float(value) for name, value in row.items()}
    return found


def write_cell(path: Path, cell: Cell, measured: dict[str, float]) -> None:
    """Add a finished run."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow([*asdict(cell), *measured])
        writer.writerow([*asdict(cell).values(), *(f"{v:.4f}" for v in measured.values())])


def summarize(finished: dict[Cell, dict[str, float]]) -> list[dict[str, Any]]:
    """Return one row for each setting: means over the seeds, and differences to one chunk."""
    groups: dict[Cell, list[tuple[int, dict[str, float]]]] = {}
    for cell, measured in finished.items():
        setting = Cell(**{**asdict(cell), "seed": 0})
        groups.setdefault(setting, []).append((cell.seed, measured))
    rows = []
    for setting, runs in groups.items():
        whole = Cell(setting.dataset, "contiguous", 1, "one chunk", 1, setting.epochs, 0)
        exact = dict(groups.get(whole, []))
        row: dict[str, Any] = asdict(setting)
        del row["seed"]
        row |= {"cut": runs[0][1]["cut"], "seeds": len(runs)}
        for name in ("test", "late"):
            values = [measured[name] for _, measured in runs]
            pairs = [m[name] - exact[seed][name] for seed, m in runs if seed in exact]
            row[name] = statistics.mean(values)
            row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
            row[f"{name}_change"] = statistics.mean(pairs) if pairs else float("nan")
        rows.append(row)
    order = {name: number for number, name in enumerate(METHODS)}
    return sorted(
        rows,
        key=lambda row: (
            DATASETS.index(row["dataset"]),
            order[row["method"]],
            row["warmup"],
            row["partition"],
            row["chunks"],
        ),
    )


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([shown(value) for value in row.values()] for row in rows)


def shown(value: Any) -> str:
    """Return a cell of the table."""
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over chunks: a panel a data set, a line a method and partition."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in DATASETS if any(row["dataset"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(names), figsize=(4.6 * len(names), 4.4), squeeze=False)
    methods = [m for m in METHODS if m != "one chunk" and any(r["method"] == m for r in rows)]
    colours = dict(zip(methods, cast(Any, plt.get_cmap("tab10")).colors, strict=False))
    for axis, name in zip(axes[0], names, strict=True):
        here = [row for row in rows if row["dataset"] == name]
        whole = [row for row in here if row["method"] == "one chunk"]
        lines = {(r["method"], r["warmup"], r["partition"]): None for r in here if r not in whole}
        for number, (method, warmup, partition) in enumerate(lines):
            key = (method, warmup, partition)
            own = [r for r in here if (r["method"], r["warmup"], r["partition"]) == key]
            points = [*whole[:1], *own]
            label = f"{method}, {partition}" + (f", warm-up {warmup}" if warmup > 1 else "")
            axis.errorbar(
                [row["chunks"] + 0.03 * (number - len(lines) / 2) for row in points],
                [row["test"] for row in points],
                [row["test_std"] for row in points],
                label=label,
                color=colours[method],
                linestyle="-" if partition == "metis" else "--",
                marker="o" if partition == "metis" else "s",
                markersize=4,
                capsize=3,
                linewidth=1.3,
            )
        axis.set_title(name, loc="left")
        axis.set_xlabel("chunks")
        axis.set_xticks(sorted({row["chunks"] for row in here}))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("test accuracy [%]")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--output", type=Path, default=Path("outputs/dropped_edges"))
    add("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    add("--partitions", nargs="+", default=["contiguous", "metis"])
    add("--chunks", type=int, nargs="+", default=[1, 2, 3, 4])
    add("--methods", nargs="+", choices=list(METHODS)[1:], default=["dropped", "constant"])
    add("--warmup", type=int, default=1, help="exact epochs at the start, with histories")
    add("--epochs", type=int, default=100)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--only-report", action="store_true", help="train nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
