"""What costs accuracy in random chunks: stale rows, or late gradients, and what about them?

    python examples/benchmarks/staleness_parts/main.py --root DIR --dataset Cora --seeds 0 1

Trains GCNII with each part of staleness by itself, which no pipeline could do: over the whole
graph, whose edges between chunks take a row, or a gradient, of another kind. The first step is
exact; validation follows every step. Prints test accuracy at the best validation accuracy, its mean
over the last 20 epochs, how far it falls below the best there, and, if "exact" comes first, the
epochs until the mean of 5 is within a point of what exact training ends with.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))
from common import print_table
from graphs import load_graph

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.graph import partition_nodes
from lightning_gnnpipe.models import GCNII

Gradients = Literal["exact", "weighted", "other masks", "last step", "late"]
NUM_LATE = 20
MARGIN = 1.0  # points by which a target is below what exact training ends with


@dataclass(frozen=True)
class Part:
    """What a stale edge takes.

    Args:
        has_stale_rows: Whether its reader takes the row of validation with 0.7 of the last dropout;
            else the row of this step.
        gradients: What its source takes, times `decay`: the gradient of this step ("exact" with
            factors of 1, "weighted" with these), that of another exact pass ("other masks"), that
            of an exact pass in the last step ("last step"), or what the step before had computed,
            late gradients in it ("late").
        decay: Factor on stale edges.
        scale: Factor on fresh edges between chunks.
        lead: Steps that a late gradient is carried forward.
    """

    has_stale_rows: bool
    gradients: Gradients
    decay: float = 1.0
    scale: float = 1.0
    lead: float = 0.0


PARTS = {
    "exact": Part(False, "exact"),
    "stale rows": Part(True, "exact"),
    "late gradients, predicted": Part(False, "late", 0.5, 1.5, 0.5),
    "late gradients, 0.75, 1.25, 0.3": Part(False, "late", 0.75, 1.25, 0.3),
    "late gradients, delayed": Part(False, "late"),
    "both, predicted": Part(True, "late", 0.5, 1.5, 0.5),
    "stale rows, factors 0.5 and 1.5": Part(True, "weighted", 0.5, 1.5),
    "stale rows, gradients of other masks": Part(True, "other masks"),
    "stale rows, exact gradients a step late": Part(True, "last step"),
}
NOISE = 0.7


@dataclass(frozen=True)
class Edges:
    """Weights of the edges in an order of chunks, `[num_nodes, num_nodes]` each; sparse.

    Attributes:
        fresh, stale: By target, for rows.
        inner_back, fresh_back, stale_back: By source, for gradients: edges within chunks, fresh
            ones between chunks, stale ones.
    """

    fresh: Tensor
    stale: Tensor
    inner_back: Tensor
    fresh_back: Tensor
    stale_back: Tensor


class Graph:
    """A graph with GCN's weights, in chunks."""

    def __init__(self, data: Data, chunk: Tensor) -> None:
        edges = gcn_norm(data.edge_index, None, data.num_nodes, dtype=torch.get_default_dtype())
        (self._source, self._target), self._weights = edges
        self._num_nodes = int(data.num_nodes or 0)
        self._chunk = chunk
        self._is_inner = chunk[self._source] == chunk[self._target]
        every = torch.ones_like(self._is_inner)
        self.whole, self.whole_back = self._matrix(every), self._matrix(every, back=True)

    def edges(self, order: Tensor) -> Edges:
        """Return the edges by kind; `order` is the chunks, first to last, `[num_chunks]`."""
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        ahead = place[self._chunk[self._source]] < place[self._chunk[self._target]]
        fresh = self._is_inner | ahead
        return Edges(
            self._matrix(fresh),
            self._matrix(~fresh),
            self._matrix(self._is_inner, back=True),
            self._matrix(fresh & ~self._is_inner, back=True),
            self._matrix(~fresh, back=True),
        )

    def _matrix(self, which: Tensor, *, back: bool = False) -> Tensor:
        ends = self._source[which], self._target[which]
        rows, columns = ends if back else ends[::-1]
        shape = (self._num_nodes, self._num_nodes)
        entries = torch.sparse_coo_tensor(
            torch.stack([rows, columns]), self._weights[which], shape, check_invariants=False
        )
        return entries.coalesce().to_sparse_csr()


@dataclass
class Layer:
    """What one layer keeps from step to step; all `[num_nodes, channels]`."""

    validated: Tensor | None = None  # its input in validation
    noise: Tensor | None = None  # the step's input less that
    late: Tensor | None = None  # gradient of its outputs of the last step
    before: Tensor | None = None  # and of the one before
    other: Tensor | None = None  # that of an exact pass

    @property
    def stale_rows(self) -> Tensor | None:
        if self.validated is None or self.noise is None:
            return self.validated
        return self.validated + NOISE * self.noise


@dataclass
class Pass:
    """How one pass reads."""

    part: Part | None = None  # None: exactly
    edges: Edges | None = None
    is_training: bool = False
    keeps: Callable[[int, Tensor], None] | None = None  # is given each layer's gradient


class Propagation(torch.autograd.Function):
    """The sum over neighbours, of rows and gradients of such kinds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: Layer, graph: Graph, how: Pass, at: int) -> Tensor:
        ctx.given = layer, graph, how, at
        if how.part is None or how.edges is None or not how.part.has_stale_rows:
            return graph.whole @ rows
        stale = layer.stale_rows
        assert stale is not None
        return how.edges.fresh @ rows + how.edges.stale @ stale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        layer, graph, how, at = ctx.given
        if how.keeps is not None:
            how.keeps(at, grad)
        part, edges = how.part, how.edges
        if part is None or edges is None or part.gradients == "exact":
            return graph.whole_back @ grad, None, None, None, None
        found = edges.inner_back @ grad + part.scale * (edges.fresh_back @ grad)
        late = late_gradient(part, layer, grad)
        if late is not None:
            found += part.decay * (edges.stale_back @ late)
        layer.before, layer.late = layer.late, grad.clone()
        return found, None, None, None, None


def late_gradient(part: Part, layer: Layer, grad: Tensor) -> Tensor | None:
    """Return the gradient that stale edges pass on."""
    if part.gradients == "weighted":
        return grad
    if part.gradients != "late":
        return layer.other
    if layer.late is None or layer.before is None:
        return layer.late
    return layer.late + part.lead * (layer.late - layer.before)


@dataclass
class Training:
    """A network that is trained with one part of staleness."""

    net: GCNII
    graph: Graph
    data: Data
    part: Part
    optimizer: torch.optim.Optimizer
    layers: list[Layer] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [Layer() for _ in self.net.convs]

    def logits(self, how: Pass) -> Tensor:
        """Return GCNII's outputs, `[num_nodes, num_classes]`."""
        net, share = self.net, self.net.dropout.p
        x = x_0 = net.lin_in(F.dropout(self.data.x, share, how.is_training)).relu()
        for at, (conv, layer) in enumerate(zip(net.convs, self.layers, strict=True)):
            x = F.dropout(x, share, how.is_training)
            mixed = Propagation.apply(x, layer, self.graph, how, at)
            if not how.is_training:
                layer.validated = x.detach()
            elif how.keeps is None and layer.validated is not None:
                layer.noise = x.detach() - layer.validated
            mixed = (1 - conv.alpha) * mixed + conv.alpha * x_0
            x = torch.addmm(mixed, mixed, conv.weight1, beta=1 - conv.beta, alpha=conv.beta).relu()
        return net.lin_out(F.dropout(x, share, how.is_training))

    def loss(self, how: Pass) -> Tensor:
        mask = self.data.train_mask
        return F.cross_entropy(self.logits(how)[mask], self.data.y[mask])

    def step(self, edges: Edges | None) -> None:
        """Make a step in an order of chunks; None: exactly."""
        kind = self.part.gradients
        newest: dict[int, Tensor] = {}
        if kind in ("other masks", "last step"):
            self.loss(Pass(is_training=True, keeps=newest.__setitem__)).backward()
            if kind == "other masks":
                self._keep(newest)
        self.optimizer.zero_grad()
        self.loss(Pass(self.part, edges, is_training=True)).backward()
        if kind == "last step":
            self._keep(newest)
        self.optimizer.step()

    def _keep(self, found: dict[int, Tensor]) -> None:
        for at, grad in found.items():
            self.layers[at].other = grad

    @torch.no_grad()
    def accuracies(self) -> tuple[float, float]:
        """Return those of the validation and the test set; their rows are the next stale ones."""
        found = self.logits(Pass()).argmax(-1) == self.data.y
        val, test = (found[self.data[f"{name}_mask"]].double().mean() for name in ("val", "test"))
        return float(val), float(test)


@dataclass(frozen=True)
class Run:
    """One run, in %: test accuracy at the best validation accuracy, and in each epoch."""

    best: float
    curve: list[float]

    @property
    def late(self) -> float:
        return statistics.mean(self.curve[-NUM_LATE:])

    @property
    def fall(self) -> float:
        return self.best - min(self.curve[-NUM_LATE:])

    def epochs_to(self, target: float) -> float:
        """Return after how many epochs the mean of the last 5 is as high; infinity if never."""
        ends = range(5, len(self.curve) + 1)
        reached = (end for end in ends if statistics.mean(self.curve[end - 5 : end]) >= target)
        return next(reached, math.inf)


def train(data: Data, part: Part, *, num_chunks: int, num_epochs: int, seed: int) -> Run:
    """Train with one part of staleness, in random chunks."""
    L.seed_everything(seed, verbose=False)
    net = GCNII(data.num_features, 64, int(data.y.max()) + 1, 32, dropout=0.6)
    maps = [*net.lin_in.parameters(), *net.lin_out.parameters()]
    groups = [
        {"params": list(net.convs.parameters()), "weight_decay": 0.01},
        {"params": maps, "weight_decay": 5e-4},
    ]
    chunk = partition_nodes(
        data.edge_index, data.num_nodes, num_chunks=num_chunks, method="random", seed=0
    )
    optimizer = torch.optim.Adam(groups, lr=0.01)
    training = Training(net, Graph(data, chunk), data, part, optimizer)
    generator = torch.Generator().manual_seed(seed + 100)
    curve = []
    for epoch in range(num_epochs):
        order = torch.randperm(num_chunks, generator=generator) if epoch else None
        training.step(None if order is None else training.graph.edges(order))
        curve.append(training.accuracies())
    best = max(curve, key=lambda pair: pair[0])[1]
    return Run(100 * best, [100 * test for _, test in curve])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default=os.environ.get("GNNPIPE_DATA"))
    parser.add_argument("--dataset", default="Cora")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse")  # CSR is in beta; unchecked indices
    data = FullGraphDataModule(load_graph(options.dataset, options.root)).data
    settings = {"num_chunks": options.chunks, "num_epochs": options.epochs}
    exact: list[Run] | None = None
    rows = []
    for name in options.parts:
        runs = [train(data, PARTS[name], seed=seed, **settings) for seed in options.seeds]
        exact = runs if name == "exact" else exact
        target = statistics.mean(run.late for run in exact) - MARGIN if exact else math.inf
        figures = [run.best for run in runs], [run.late for run in runs]
        rows.append(
            [
                name,
                f"{statistics.mean(figures[0]):.1f}",
                ", ".join(f"{one:.1f}" for one in figures[0]),
                f"{statistics.mean(figures[1]):.1f}",
                f"{max(run.fall for run in runs):.1f}",
                ", ".join(f"{run.epochs_to(target):.0f}" for run in runs) if exact else "",
            ]
        )
    header = ["part", "test, %", "by seed", "last 20 epochs", "worst fall", "epochs to target"]
    print_table(header, rows)


if __name__ == "__main__":
    main()
