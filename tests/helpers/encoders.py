"""Models whose encoder is read by every layer, so that it crosses each cut, or is repeated."""

from __future__ import annotations

import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn

from tests.helpers.graphs import NUM_CLASSES, NUM_EDGE_FEATURES, NUM_FEATURES

WIDTH = 6


class Encoded(nn.Module):
    """GCNII with dropout in front of `encode`, which gives what enters the layers, and x_0."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_FEATURES, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.convs = nn.ModuleList(
            gnn.GCN2Conv(WIDTH, alpha=0.2, theta=0.5, layer=layer + 1) for layer in range(4)
        )
        self.lin_out = nn.Linear(WIDTH, NUM_CLASSES)
        self.dropout = nn.Dropout(dropout)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_0 = self.lin_in(self.dropout(x)).relu()
        return x_0, x_0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h, x_0 = self.encode(x)
        for conv in self.convs:
            h = self.act(conv(self.dropout(h), x_0, edge_index))
        return self.lin_out(h + x_0)


class InPlace(Encoded):
    """Overwrites what the encoder computes, within it."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_0 = self.lin_in(self.dropout(x))
        x_0 += 0.5
        x_0 = self.act(x_0)
        return x_0, x_0


class Overwritten(Encoded):
    """Reads the encoder through a tensor that something else overwrites: it is not repeated."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_0 = self.lin_in(self.dropout(x))
        return self.act(x_0) * 2, x_0


class Behind(Encoded):
    """Draws the encoder's mask behind that of another branch: it is not repeated."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.branch = nn.Linear(NUM_FEATURES, WIDTH)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        other = self.dropout(self.branch(x))
        x_0 = self.lin_in(self.dropout(x)).relu()
        return x_0 + other, x_0


class Frozen(Encoded):
    """With an encoder that is not trained."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.lin_in.requires_grad_(False)


class Two(nn.Module):
    """Two encoders, which share a layer, and a third one in the middle of the layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin_in, self.lin_more = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lin_late = nn.Linear(NUM_FEATURES, WIDTH)
        self.convs = nn.ModuleList(gnn.SAGEConv(WIDTH, WIDTH) for _ in range(4))
        self.lin_out = nn.Linear(WIDTH, NUM_CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x_0 = self.lin_in(self.dropout(x)).relu()
        y_0 = self.lin_more(self.dropout(x_0)).tanh()
        for number, conv in enumerate(self.convs):
            if number == 1:
                z_0 = self.lin_late(x).tanh()
            h = conv(h, edge_index).relu() + (y_0 if number % 2 else x_0)
            h = self.dropout(h)
        return self.lin_out(h + z_0)


class PyG(nn.Module):
    """PyG's examples/gcn2_cora.py, with an edge index in place of a sparse matrix."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lins = nn.ModuleList()
        self.lins.append(nn.Linear(NUM_FEATURES, WIDTH))
        self.lins.append(nn.Linear(WIDTH, NUM_CLASSES))
        self.convs = nn.ModuleList()
        for layer in range(4):
            self.convs.append(gnn.GCN2Conv(WIDTH, 0.1, 0.5, layer + 1, shared_weights=True))
        self.dropout = dropout

    def forward(self, x: Tensor, adj_t: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, training=self.training)
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = F.dropout(x, self.dropout, training=self.training)
            x = conv(x, x_0, adj_t)
            x = x.relu()
        x = F.dropout(x, self.dropout, training=self.training)
        x = self.lins[1](x)
        return x.log_softmax(dim=-1)


class EdgeEncoded(nn.Module):
    """Every layer reads encoded edge features, one row an edge."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_EDGE_FEATURES, WIDTH)
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.convs = nn.ModuleList(gnn.GINEConv(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.lin_out = nn.Linear(WIDTH, NUM_CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        edge_attr = self.dropout(self.lin_in(edge_attr)).relu()
        x = self.first(x)
        for conv in self.convs:
            x = x + self.dropout(conv(x, edge_index, edge_attr).tanh())
        return self.lin_out(x)


ENCODED_NETS = {
    "encoded": Encoded,
    "in_place": InPlace,
    "overwritten": Overwritten,
    "behind": Behind,
    "frozen": Frozen,
    "two": Two,
    "pyg": PyG,
    "edge_encoded": EdgeEncoded,
}
REPEATED = {"encoded", "in_place", "frozen", "two", "pyg", "edge_encoded"}
"""Those of which stages compute the encoder again."""
