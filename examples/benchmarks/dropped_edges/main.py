"""What does it cost to leave out the edges between chunks, as GPipe would, beside histories?

    python examples/benchmarks/dropped_edges/main.py --root DIR

Trains a 2-layer GAT on Cora, CiteSeer and PubMed in 1 to 4 chunks: with the edges between chunks
dropped, and kept by histories, with methods of `staleness`. Chunks are runs of node numbers, as
where a list of nodes is split for GPipe, or METIS's. Prints tables, writes them to
OUTPUT/accuracy.csv, a picture to OUTPUT/accuracy.png, and each run to OUTPUT/cells.csv as soon as
it is finished; runs that are there are not made again. All runs of a seed begin with the same
weights. One process of one stage trains what any number of stages would.

Source: Dearing and Wang, Analyzing the Performance of Graph Neural Networks with Pipe Parallelism
(https://arxiv.org/abs/2012.10840), whose micro-batches lose the edges between them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))
from cells import DATASETS, METHODS, Cell, read_cells, write_cell
from graphs import load_graph
from quiet import silence_lightning
from report import draw, print_accuracies, summarize, write_rows
from watched import Watched

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.graph import edge_cut_frac, partition_nodes

DEFAULT = ["dropped", "constant", "drift"]
EVERY = 4  # epochs between two looks at the held-out sets; validation runs after each
DROPOUT = 0.6
NUM_LATE = 40  # epochs at the end, of which the mean accuracy is noted as well


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


class WordGAT(nn.Module):
    """The GAT paper's network for citations (https://arxiv.org/abs/1710.10903): 8 heads of 8.

    Dropout of 0.6 is drawn for words that are there, which has the same law and takes less time.
    """

    def __init__(self, in_channels: int, out_channels: int, out_heads: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                GATConv(in_channels, 8, heads=8, dropout=DROPOUT),
                GATConv(64, out_channels, out_heads, concat=False, dropout=DROPOUT),
            ]
        )
        self.words, self.dropout = WordDropout(DROPOUT), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, last = self.convs
        x = F.elu(first(self.words(x), edge_index))
        return last(self.dropout(x), edge_index)


class Curves(L.Callback):
    """The accuracy on both held-out sets, one number each time that they are looked at."""

    def __init__(self) -> None:
        self.val: list[float] = []
        self.test: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if (trainer.current_epoch + 1) % EVERY:
            return
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
    for figure in ("test", "late"):
        print(f"\n{figure}:\n")
        print_accuracies(rows, figure)
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


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--output", type=Path, default=Path("outputs/dropped_edges"))
    add("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    add("--partitions", nargs="+", default=["contiguous", "metis"])
    add("--chunks", type=int, nargs="+", default=[1, 2, 3, 4])
    add("--methods", nargs="+", choices=list(METHODS)[1:], default=DEFAULT)
    add("--warmup", type=int, default=1, help="exact epochs at the start, with histories")
    add("--epochs", type=int, default=100)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--only-report", action="store_true", help="train nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
