"""Training steps in chunks by the package, beside a short program that computes the same.

    python examples/benchmarks/chunk_overhead/by_hand.py [--root DIR]

The program by hand knows its network, a GCN with LayerNorm and dropout. It has no Trainer, no
random streams of its own, one order of chunks, no exact first step, no ages and no checks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from common import make_edges, print_table
from graphs import load_graph

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.graph import partition_nodes

CHUNKS = (1, 8, 16)
NUM_LAYERS, CHANNELS, DROPOUT = 12, 64, 0.2
NUM_WARM_STEPS = 4
_FEW = 32  # added to the number of rows that a drift is the mean of


class GCN(nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.lin_in = nn.Linear(num_features, CHANNELS)
        self.convs = nn.ModuleList(GCNConv(CHANNELS, CHANNELS) for _ in range(NUM_LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(NUM_LAYERS))
        self.lin_out = nn.Linear(CHANNELS, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin_in(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), DROPOUT, self.training)
        return self.lin_out(x)


class Classifier(L.LightningModule):
    def __init__(self, network: GCN) -> None:
        super().__init__()
        self.network = network

    def training_step(self, data: Data, index: int) -> Tensor:
        return F.cross_entropy(self.network(data.x, data.edge_index), data.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


class Stopwatch(L.Callback):
    def __init__(self) -> None:
        self.step_s: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.step_s.append(time.perf_counter() - self.start)


def train_by_package(data: Data, num_chunks: int, num_steps: int) -> list[float]:
    """Return the seconds of each step on one device."""
    watch = Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(num_chunks=num_chunks),
        max_epochs=num_steps,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(_make_network(data)), datamodule=FullGraphDataModule(data))
    return watch.step_s


class _Chunk:
    """Nodes `start` to `end`, in the order of chunks, with the edges that they read and write.

    `rows`: edges that end in the chunk. `stale`: their weight from later chunks, `[num_nodes]`.
    `columns`: edges that start in it and end in it or in a later chunk, which reads it fresh.
    """

    def __init__(self, edges: Tensor, weights: Tensor, start: int, end: int) -> None:
        self.start, self.end = start, end
        source, target = edges
        is_own = (target >= start) & (target < end)
        own_rows = target[is_own] - start
        self.rows = _sorted(own_rows, source[is_own], weights[is_own], end - start)
        later = weights[is_own] * (source[is_own] >= end)
        self.stale = torch.zeros(end - start).index_add_(0, own_rows, later)
        is_read = (source >= start) & (source < end) & (target >= start)
        self.columns = _sorted(
            source[is_read] - start, target[is_read], weights[is_read], end - start
        )


def _sorted(row: Tensor, column: Tensor, weights: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    order = torch.argsort(row * (int(column.max()) + 1) + column)
    counts = torch.bincount(row, minlength=num_rows)
    return column[order].int(), (counts.cumsum(0) - counts).int(), weights[order]


def _multiply(rows: tuple[Tensor, ...], table: Tensor) -> Tensor:
    indices, offsets, weights = rows
    return torch.embedding_bag(table, indices, offsets, False, 0, False, weights, False)[0]


class _Table:
    """What a layer exchanges between chunks: rows, their drift in this step, gradients of sums."""

    def __init__(self, num_nodes: int) -> None:
        self.rows = torch.zeros(num_nodes, CHANNELS)
        self.drift = torch.zeros(CHANNELS)
        self.grads = torch.zeros(num_nodes, CHANNELS)


class _Aggregate(torch.autograd.Function):
    """Sum over neighbours; a stale one is its last row and the mean change of fresh ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: _Table, chunk: _Chunk) -> Tensor:
        ctx.given = table, chunk
        if chunk.end - chunk.start == len(table.rows):  # one chunk
            return _multiply(chunk.rows, x)
        own = table.rows[chunk.start : chunk.end]
        table.drift += x.sum(0) - own.sum(0)
        own.copy_(x)
        drift = table.drift / (chunk.end + _FEW)
        return _multiply(chunk.rows, table.rows).addr_(chunk.stale, drift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        table, chunk = ctx.given
        if chunk.end - chunk.start == len(table.rows):
            return _multiply(chunk.columns, grad.contiguous()), None, None
        table.grads[chunk.start : chunk.end] = grad
        return _multiply(chunk.columns, table.grads), None, None


def train_by_hand(data: Data, num_chunks: int, num_steps: int) -> list[float]:
    """Return the seconds of each step, in which chunks always run in the same order."""
    edges, weights = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
    parts = partition_nodes(data.edge_index, data.num_nodes, num_chunks=num_chunks, method="metis")
    order, sizes = torch.argsort(parts, stable=True), torch.bincount(parts).tolist()
    edges = torch.argsort(order)[edges]
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    chunks = [_Chunk(edges, weights, *ends[i : i + 2]) for i in range(num_chunks)]
    features, labels = data.x[order].split(sizes), data.y[order]

    network = _make_network(data)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    tables = [_Table(data.num_nodes) for _ in range(NUM_LAYERS)]

    def run(chunk: _Chunk, x: Tensor) -> Tensor:
        x = network.lin_in(x)
        layers: Any = zip(network.convs, network.norms, tables, strict=True)
        for conv, norm, table in layers:
            x = cast(Any, _Aggregate).apply(conv.lin(x), table, chunk) + conv.bias
            x = F.dropout(norm(x).relu(), DROPOUT)
        return network.lin_out(x)

    step_s = []
    for _ in range(num_steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        for table in tables:
            table.drift.zero_()
        outputs = [run(chunk, x) for chunk, x in zip(chunks, features, strict=True)]
        leaf = torch.cat([one.detach() for one in outputs]).requires_grad_()
        [grad] = torch.autograd.grad(F.cross_entropy(leaf, labels), leaf)
        grads = torch.split(grad, sizes)
        for output, grad in reversed(list(zip(outputs, grads, strict=True))):
            torch.autograd.backward(output, grad)
        optimizer.step()
        step_s.append(time.perf_counter() - start)
    return step_s


def _make_network(data: Data) -> GCN:
    torch.manual_seed(0)
    return GCN(data.num_features, int(data.y.max()) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", help="folder of raw data sets; then Minesweeper is the graph")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--num-nodes", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.root:
        data = load_graph("Minesweeper", options.root)[0]
    else:
        edges = make_edges(options.num_nodes, 8 * options.num_nodes)
        data = Data(
            x=torch.randn(options.num_nodes, CHANNELS),
            edge_index=edges,
            y=torch.randint(8, (options.num_nodes,)),
        )
    ways = {"by hand": train_by_hand, "package": train_by_package}
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for num_chunks in CHUNKS:
            for name, train in ways.items():
                step_s = train(data, num_chunks, options.steps)[NUM_WARM_STEPS:]
                found.setdefault((name, num_chunks), []).extend(step_s)
    median = {key: statistics.median(step_s) for key, step_s in found.items()}
    base = median["package", 1]
    rows = [
        [
            f"K={k}",
            *(f"{median[name, k]:.4f} ({median[name, k] / base:.2f})" for name in ways),
            f"{median['package', k] / median['by hand', k]:.2f}",
        ]
        for k in CHUNKS
    ]
    print_table(["chunks", *ways, "package over by hand"], rows)


if __name__ == "__main__":
    main()
