"""Batches of many small graphs: graphs drawn at random, models of all kinds, a module around them.

The models are written as any user of PyG would, some for a `Batch`, some for bare tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data
from vig import PixelViG, ViG

from lightning_gnnpipe.models import GIN

NUM_FEATURES = 5
NUM_EDGE_FEATURES = 3
WIDTH = 8
NUM_TARGETS = 2

SIZES = (4, 7, 1, 9, 5, 6, 3, 8, 5, 4, 6, 2)
"""Nodes of each graph of an ordinary batch: more of them than of micro-batches in any test."""

ODD_SIZES: dict[str, tuple[int, ...]] = {
    "empty inside": (4, 0, 7, 5, 0, 0, 3, 6),
    "empty first": (0, 0, 4, 7, 5),
    "empty last": (4, 7, 5, 3, 0, 0),
    "single nodes": (1, 1, 1, 1, 1, 1),
    "one graph": (9,),
    "one node": (1,),
    "fewer graphs than micro-batches": (5, 4),
    "one large": (40, 2, 1, 3),
    "as many graphs as nodes": (2, 0, 1, 3, 0, 0),
}


def draw_graph(num_nodes: int, generator: torch.Generator, degree: float = 2.0) -> Data:
    """Return a random graph of `num_nodes`; single nodes have no edge."""
    num_edges = int(degree * num_nodes) if num_nodes > 1 else 0
    ends = torch.randint(0, max(num_nodes, 1), (2, num_edges), generator=generator)
    return Data(
        x=torch.randn(num_nodes, NUM_FEATURES, generator=generator, dtype=torch.float64),
        edge_index=ends,
        edge_attr=torch.randn(
            num_edges, NUM_EDGE_FEATURES, generator=generator, dtype=torch.float64
        ),
        edge_weight=torch.rand(num_edges, generator=generator, dtype=torch.float64),
        y=torch.randn(1, NUM_TARGETS, generator=generator, dtype=torch.float64),
        name="graph " * num_nodes,
    )


def draw_batch(sizes: Sequence[int], seed: int = 0, degree: float = 2.0) -> Batch:
    """Return a batch of random graphs of `sizes` nodes."""
    generator = torch.Generator().manual_seed(seed)
    return Batch.from_data_list([draw_graph(size, generator, degree) for size in sizes])


class GINE(nn.Module):
    """Edge features, three poolings of a `Batch`, two of them without the number of graphs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_FEATURES, WIDTH)
        self.convs = nn.ModuleList(
            gnn.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=NUM_EDGE_FEATURES) for _ in range(3)
        )
        self.lin_out = nn.Linear(3 * WIDTH, NUM_TARGETS)
        self.dropout = dropout

    def forward(self, data: Any) -> Tensor:
        x = self.lin_in(data.x)
        for conv in self.convs:
            x = x + F.relu(conv(x, data.edge_index, data.edge_attr))
            x = F.dropout(x, self.dropout, training=self.training)
        pooled = [
            gnn.global_mean_pool(x, data.batch, data.num_graphs),
            gnn.global_add_pool(x, data.batch, size=data.num_graphs),
            gnn.global_max_pool(x, data.batch, data.batch_size),
        ]
        return self.lin_out(torch.cat(pooled, dim=-1))


class WeightedGCN(nn.Module):
    """Edge weights and bare tensors; outputs of both kinds in a dict."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [NUM_FEATURES, WIDTH, WIDTH, WIDTH]
        self.convs = nn.ModuleList(gnn.GCNConv(*pair) for pair in pairwise(widths))
        self.of_nodes = nn.Linear(WIDTH, 1)
        self.of_graphs = nn.Linear(WIDTH, NUM_TARGETS)
        self.dropout = dropout

    def forward(
        self, x: Tensor, edge_index: Tensor, weight: Tensor, batch: Tensor, size: int
    ) -> dict[str, Tensor]:
        for conv in self.convs:
            x = F.dropout(conv(x, edge_index, weight).tanh(), self.dropout, training=self.training)
        pooled = gnn.global_mean_pool(x, batch, size)
        return {"nodes": self.of_nodes(x), "graphs": self.of_graphs(pooled)}


class Jumping(nn.Module):
    """GAT, JumpingKnowledge, an aggregation with weights, no number of graphs anywhere."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = gnn.models.GAT(NUM_FEATURES, WIDTH, 3, WIDTH, heads=2, jk="cat", dropout=dropout)
        self.pool = gnn.AttentionalAggregation(nn.Linear(WIDTH, 1))
        self.lin_out = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.lin_out(self.pool(self.net(x, edge_index), batch))


class NormedTransformer(nn.Module):
    """TransformerConv with edge features and every norm that is taken over one graph."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_FEATURES, WIDTH)
        self.convs = nn.ModuleList(
            gnn.TransformerConv(WIDTH, WIDTH // 2, heads=2, edge_dim=NUM_EDGE_FEATURES)
            for _ in range(5)
        )
        self.norms = nn.ModuleList(
            [
                gnn.GraphNorm(WIDTH),
                gnn.InstanceNorm(WIDTH),
                gnn.PairNorm(),
                gnn.LayerNorm(WIDTH, mode="graph"),
                gnn.GraphSizeNorm(),
            ]
        )
        self.lin_out = nn.Linear(WIDTH, NUM_TARGETS)
        self.dropout = dropout

    def forward(self, data: Any) -> Tensor:
        x = self.lin_in(data.x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = F.dropout(norm(x, data.batch), self.dropout, training=self.training)
            x = x + conv(h, data.edge_index, data.edge_attr).tanh()
        return self.lin_out(gnn.global_mean_pool(x, data.batch, data.num_graphs))


class AllPairs(nn.Module):
    """Edges between all nodes of a graph."""

    def forward(self, batch: Tensor) -> Tensor:
        return (batch[:, None] == batch[None, :]).nonzero().t()


class EdgesInside(nn.Module):
    """Builds its edges itself, as networks for images do, and returns one row per node."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.edges = AllPairs()
        self.convs = nn.ModuleList(
            [gnn.SAGEConv(NUM_FEATURES, WIDTH), gnn.SAGEConv(WIDTH, NUM_TARGETS)]
        )
        self.dropout = dropout

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        x = F.relu(self.convs[0](x, self.edges(batch)))
        x = F.dropout(x, self.dropout, training=self.training)
        return self.convs[1](x, self.edges(batch))


ENDS = NUM_FEATURES, WIDTH, NUM_TARGETS


def gin(dropout: float) -> GIN:
    options = {"edge_channels": NUM_EDGE_FEATURES, "virtual_node": True, "jk": "cat"}
    return GIN(*ENDS, 4, dropout, **options)


def vig(dropout: float, conv: str) -> ViG:
    return ViG(*ENDS, 3, dropout, num_neighbours=3, conv=conv)


def pixelvig(dropout: float) -> PixelViG:
    widths = dict.fromkeys(("grapher_channels", "feed_forward_channels", "head_channels"), WIDTH)
    return PixelViG(NUM_FEATURES, NUM_TARGETS, 3, **widths)


INPUTS: dict[type, tuple[str, ...]] = {
    WeightedGCN: ("x", "edge_index", "edge_weight", "batch", "num_graphs"),
    Jumping: ("x", "edge_index", "batch"),
    EdgesInside: ("x", "batch"),
    GIN: ("x", "edge_index", "batch", "edge_attr"),
    ViG: ("x", "batch"),
    PixelViG: ("x", "edge_index", "batch"),
}
"""Attributes of a batch, where a network does not take the whole."""

NETS: dict[str, Callable[[float], nn.Module]] = {
    "gine": GINE,
    "weighted": WeightedGCN,
    "jumping": Jumping,
    "transformer": NormedTransformer,
    "edges inside": EdgesInside,
    "gin": gin,
    **{f"vig {conv}": partial(vig, conv=conv) for conv in ("max_relative", "edge", "gin", "sage")},
    "pixelvig": pixelvig,
}


class GraphModule(L.LightningModule):
    """Regression on graphs, on nodes, or on both, written for one device.

    Args:
        name: Key of `NETS`.
        net: Another net than that.
        inputs: Attributes of a batch that it takes, if not as in `INPUTS`.
    """

    def __init__(
        self,
        name: str = "gine",
        dropout: float = 0.0,
        net: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        inputs: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = (NETS[name](dropout) if net is None else net).double()
        self.optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))
        self.inputs = inputs or INPUTS.get(type(self.net), ())
        self.outputs = torch.empty(0)

    def forward(self, data: Batch) -> Any:
        given = [getattr(data, name) for name in self.inputs] or [data]
        return self.net(*given)

    def loss(self, out: Any, data: Batch) -> Tensor:
        """Return the mean over graphs, or nodes; of both kinds, of their sum."""
        if isinstance(out, dict):
            graphs = F.mse_loss(out["graphs"], data.y)
            return graphs + out["nodes"].square().mean()
        if out.size(0) == data.num_nodes != data.num_graphs:
            return F.mse_loss(out, data.y[data.batch])
        return F.mse_loss(out, data.y[: out.size(0)])

    def training_step(self, data: Batch, batch_idx: int) -> dict[str, Tensor]:
        out = self(data)
        loss = self.loss(out, data)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        tensors = out.values() if isinstance(out, dict) else [out]
        self.outputs = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return {"loss": loss}

    def validation_step(self, data: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(data), data), batch_size=data.num_graphs)

    def test_step(self, data: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(self(data), data), batch_size=data.num_graphs)

    def predict_step(self, data: Batch, batch_idx: int) -> Any:
        return self(data)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


EXACT = {"rtol": 1e-10, "atol": 1e-10}


def assert_same(net: nn.Module, found: Tensor, expected: Tensor) -> None:
    """Compare outputs, and the gradients of all parameters, none of which goes without."""
    torch.testing.assert_close(found, expected, **EXACT)
    names, parameters = zip(*net.named_parameters(), strict=True)
    ours, theirs = (
        torch.autograd.grad(out.square().sum(), parameters) for out in (found, expected)
    )
    for name, one, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT, msg=lambda text, n=name: f"{n}: {text}")
