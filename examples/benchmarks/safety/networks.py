"""The networks of the panel, in plain PyG as their authors' scripts write them.

Goes in: a `Shape` (which layers, how many, how wide). Comes out: a module that is called as
`net(x, edge_index)`. Nothing in here knows of pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch_geometric.nn as gnn
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """What a network is built from; `degrees` is the histogram of in-degrees, for PNA."""

    conv: str
    norm: str
    num_layers: int
    in_channels: int
    hidden_channels: int
    out_channels: int
    dropout: float
    skip: str
    jump: bool
    degrees: Tensor


class DeepNet(nn.Module):
    """Convolution, norm, ReLU and dropout, again and again.

    The last convolution gives the outputs, as in OGB's scripts, or, with skips or JumpingKnowledge,
    a linear head does. With `skip="linear"` each convolution has a linear map beside it (Luo, Shi,
    Wu, "Classic GNNs are Strong Baselines", arXiv 2406.08993).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num, hidden = shape.num_layers, shape.hidden_channels
        has_head = shape.skip == "linear" or shape.jump
        widths = [shape.in_channels, *[hidden] * (num - 1)]
        widths.append(hidden if has_head else shape.out_channels)
        pairs = list(pairwise(widths))
        self.convs = nn.ModuleList(make_conv(shape, *pair) for pair in pairs)
        self.norms = nn.ModuleList(
            make_norm(shape.norm, hidden) for _ in range(num if has_head else num - 1)
        )
        self.skips = nn.ModuleList(nn.Linear(*pair) for pair in pairs if shape.skip == "linear")
        self.jump = gnn.JumpingKnowledge("cat") if shape.jump else None
        self.dropout = nn.Dropout(shape.dropout)
        width = num * hidden if shape.jump else hidden
        self.head = nn.Linear(width, shape.out_channels) if has_head else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        outputs = []
        for i, conv in enumerate(self.convs):
            h = conv(x, edge_index)
            if len(self.skips):
                h = h + self.skips[i](x)
            x = self.dropout(self.norms[i](h).relu()) if i < len(self.norms) else h
            outputs.append(x)
        if self.jump is not None:
            x = self.jump(outputs)
        return x if self.head is None else self.head(x)


class ResidualNet(nn.Module):
    """Two linear maps, and between them x + conv(dropout(relu(norm(x)))) in each layer.

    Source: Li, Xiong, Thabet, Ghanem, "DeeperGCN", arXiv 2006.07739, section 3.3 (ResGCN+).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num, hidden = shape.num_layers, shape.hidden_channels
        self.lin_in = nn.Linear(shape.in_channels, hidden)
        self.convs = nn.ModuleList(make_conv(shape, hidden, hidden) for _ in range(num))
        self.norms = nn.ModuleList(make_norm(shape.norm, hidden) for _ in range(num + 1))
        self.lin_out = nn.Linear(hidden, shape.out_channels)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin_in(x)
        for i, conv in enumerate(self.convs):
            x = x + conv(self.dropout(self.norms[i](x).relu()), edge_index)
        return self.lin_out(self.dropout(self.norms[-1](x).relu()))


class PropagatedNet(nn.Module):
    """APPNP: two linear maps, then `num_layers` steps of propagation without weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.lin_in = nn.Linear(shape.in_channels, shape.hidden_channels)
        self.lin_out = nn.Linear(shape.hidden_channels, shape.out_channels)
        self.propagate = gnn.APPNP(K=shape.num_layers, alpha=0.1)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.dropout(self.lin_in(self.dropout(x)).relu())
        return self.propagate(self.lin_out(x), edge_index)


def make_network(shape: Shape) -> nn.Module:
    """Return the network that `shape` describes."""
    if shape.conv == "appnp":
        return PropagatedNet(shape)
    return ResidualNet(shape) if shape.skip == "residual" else DeepNet(shape)


def make_conv(shape: Shape, in_channels: int, out_channels: int) -> nn.Module:
    """Return one convolution; those with attention have two heads, the last layer one."""
    kind, heads = shape.conv, 2 if out_channels == shape.hidden_channels else 1
    if kind == "gin":
        return gnn.GINConv(make_mlp(in_channels, shape.hidden_channels, out_channels))
    if kind == "pna":
        return gnn.PNAConv(
            in_channels,
            out_channels,
            aggregators=["mean", "max", "std"],
            scalers=["identity", "amplification"],
            deg=shape.degrees,
        )
    if kind == "gen":
        return gnn.GENConv(
            in_channels, out_channels, aggr="softmax", learn_t=True, num_layers=2, norm="layer"
        )
    if kind in WITH_HEADS:
        return WITH_HEADS[kind](in_channels, out_channels // heads, heads=heads)
    return PLAIN[kind](in_channels, out_channels)


def make_mlp(in_channels: int, hidden_channels: int, out_channels: int) -> nn.Module:
    """Return GIN's own network, with its BatchNorm inside."""
    return nn.Sequential(
        nn.Linear(in_channels, hidden_channels),
        nn.BatchNorm1d(hidden_channels),
        nn.ReLU(),
        nn.Linear(hidden_channels, out_channels),
    )


def make_norm(kind: str, channels: int) -> nn.Module:
    """Return a norm by its name in cells.yaml."""
    return NORMS[kind](channels)


PLAIN: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn": gnn.GCNConv,
    "sage": gnn.SAGEConv,
    "film": gnn.FiLMConv,
}
WITH_HEADS: dict[str, Callable[..., nn.Module]] = {
    "gat": gnn.GATConv,
    "gatv2": gnn.GATv2Conv,
    "transformer": gnn.TransformerConv,
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda _: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "layer": lambda channels: gnn.LayerNorm(channels, mode="node"),
    "layer-graph": lambda channels: gnn.LayerNorm(channels, mode="graph"),
    "graph": gnn.GraphNorm,
    "instance": gnn.InstanceNorm,
    "mean-subtraction": lambda _: gnn.MeanSubtractionNorm(),
    "pair": lambda _: gnn.PairNorm(),
    "group": lambda channels: gnn.DiffGroupNorm(channels, groups=4),
}
