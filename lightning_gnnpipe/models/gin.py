"""GIN: sums over neighbours, for the classification of small graphs, e.g. molecules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GINConv,
    GINEConv,
    JumpingKnowledge,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

Norm = Literal["layer", "batch"]
Pool = Literal["mean", "sum", "max"]
_POOLS = {"mean": global_mean_pool, "sum": global_add_pool, "max": global_max_pool}


class GIN(nn.Module):
    r"""Graph isomorphism network: an MLP of two layers on the sum over neighbours.

    Each layer computes, with E the encoded features of the edges,

        X' = dropout(relu(norm(mlp((1 + eps) X[n] + sum(relu(X[m] + E[m, n]) for m -> n)))))

    Without edge features the sum is over X[m]. The last layer has no ReLU. A virtual node adds a
    row V to each graph. Every layer reads it, and every layer but the last updates it:

        X <- X + V[graph of n];  layer;  V <- mlp(V + sum(X of the graph, as the layer read it))

    A linear classifier reads the pooled nodes of each graph.

    Source: Xu, Hu, Leskovec and Jegelka, "How Powerful are Graph Neural Networks?",
    https://arxiv.org/abs/1810.00826; features, edges and virtual node as in Hu et al., "Open Graph
    Benchmark", https://arxiv.org/abs/2005.00687

    Args:
        in_channels: Number of features of a node. For integer features (OGB's molecules), the
            number of values of each.
        hidden_channels: Channels of every layer.
        out_channels: Classes.
        num_layers: Graph convolutions.
        dropout: Share of every layer's output that is zeroed in training.
        edge_channels: Features of an edge, like ``in_channels``; None for edges without features.
        virtual_node: Whether each graph has a virtual node.
        jk: "cat" or "max" joins the outputs of all layers (jumping knowledge); None takes the last.
        pool: "mean", "sum" or "max" over the nodes of each graph.
        norm: "layer", over the channels of one node, or "batch", over all nodes of the mini-batch,
            or of the micro-batch if there are several.

    Shapes:
        - input: x ``[num_nodes, in_channels]``, edge_index ``[2, num_edges]``, batch
          ``[num_nodes]``, in ascending order, edge_attr ``[num_edges, edge_channels]``; integer
          features have one column per entry of ``in_channels`` or ``edge_channels``
        - output: ``[num_graphs, out_channels]``
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 5,
        dropout: float = 0.5,
        *,
        edge_channels: int | Sequence[int] | None = None,
        virtual_node: bool = False,
        jk: Literal["cat", "max"] | None = None,
        pool: Pool = "mean",
        norm: Norm = "layer",
    ) -> None:
        super().__init__()
        self.encoder = _make_encoder(in_channels, hidden_channels)
        self.layers = nn.ModuleList(
            GINLayer(hidden_channels, edge_channels, dropout, norm, is_last=n == num_layers - 1)
            for n in range(num_layers)
        )
        num_updates = num_layers - 1 if virtual_node else 0
        self.virtual = nn.Parameter(torch.zeros(1, hidden_channels)) if virtual_node else None
        self.updates = nn.ModuleList(
            VirtualNodeUpdate(hidden_channels, dropout, norm) for _ in range(num_updates)
        )
        self.jump = JumpingKnowledge(jk) if jk is not None else None
        width = num_layers * hidden_channels if jk == "cat" else hidden_channels
        self.head = Classifier(width, out_channels, pool)

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor:
        x, virtual, outputs = self.encoder(x), self.virtual, []
        for number, layer in enumerate(self.layers):
            if virtual is not None:
                x = x + (virtual[batch] if number > 0 else virtual)
                if number < len(self.updates):
                    virtual = self.updates[number](x, virtual, batch)
            x = layer(x, edge_index, edge_attr)
            outputs.append(x)
        if self.jump is not None:
            x = self.jump(outputs)
        return self.head(x, batch)


class GINLayer(nn.Module):
    """dropout(relu(norm(conv(X, encoder(edge_attr))))), the last one without ReLU."""

    def __init__(
        self,
        channels: int,
        edge_channels: int | Sequence[int] | None,
        dropout: float,
        norm: Norm,
        is_last: bool,
    ) -> None:
        super().__init__()
        mlp = _make_mlp(channels, norm)
        self.edge_encoder = None
        if edge_channels is not None:
            self.edge_encoder = _make_encoder(edge_channels, channels)
        conv = GINConv if edge_channels is None else GINEConv
        self.conv = conv(mlp, train_eps=True)
        self.after = nn.Sequential(
            _make_norm(norm, channels),
            nn.Identity() if is_last else nn.ReLU(),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
        if (edge_attr is None) is not (self.edge_encoder is None):
            raise ValueError(
                "Expected 'edge_attr' if 'edge_channels' is set, and only then (got "
                f"{'none' if edge_attr is None else 'features'}). If the edges have features, "
                "build the network with 'edge_channels' and pass 'edge_attr' to it."
            )
        if self.edge_encoder is None:
            return self.after(self.conv(x, edge_index))
        return self.after(self.conv(x, edge_index, self.edge_encoder(edge_attr)))


class VirtualNodeUpdate(nn.Module):
    """mlp(V + sum over the graph of X); V: ``[num_graphs, channels]`` or ``[1, channels]``."""

    def __init__(self, channels: int, dropout: float, norm: Norm) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            _make_mlp(channels, norm), _make_norm(norm, channels), nn.ReLU(), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, virtual: Tensor, batch: Tensor) -> Tensor:
        return self.mlp(virtual + global_add_pool(x, batch))


class Classifier(nn.Module):
    """A linear map of the pooled nodes of each graph."""

    def __init__(self, channels: int, out_channels: int, pool: Pool) -> None:
        super().__init__()
        self.pool = _POOLS[pool]
        self.lin = nn.Linear(channels, out_channels)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.lin(self.pool(x, batch))


class CategoricalEncoder(nn.Module):
    """Sum of the embeddings of the columns ``[num_rows, num_columns]`` of integers."""

    def __init__(self, num_values: Sequence[int], channels: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(number, channels) for number in num_values)
        for weight in self.parameters():
            nn.init.xavier_uniform_(weight)

    def forward(self, columns: Tensor) -> Tensor:
        values = zip(self.tables, columns.unbind(dim=1), strict=True)
        return torch.stack([table(column) for table, column in values]).sum(dim=0)


def _make_encoder(channels_in: int | Sequence[int], channels: int) -> nn.Module:
    if isinstance(channels_in, int):
        return nn.Linear(channels_in, channels)
    return CategoricalEncoder(channels_in, channels)


def _make_mlp(channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(channels, 2 * channels),
        _make_norm(norm, 2 * channels),
        nn.ReLU(),
        nn.Linear(2 * channels, channels),
    )


def _make_norm(norm: Norm, channels: int) -> nn.Module:
    return {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[norm](channels)
