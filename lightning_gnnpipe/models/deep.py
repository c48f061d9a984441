"""Deep networks: GCNII, ResGCN+, and GNN (convolutions with norms and skips)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv, LayerNorm, SAGEConv


class GCNII(nn.Module):
    r"""A deep stack of graph convolutions with initial residual and identity mapping.

    With X_0 = relu(W_in x), beta_l = log(theta / l + 1) and P the normalised adjacency with
    self-loops, layer l = 1 .. num_layers computes

        X' = relu(((1 - alpha) P X + alpha X_0) ((1 - beta_l) I + beta_l W_l))

    X and X_0 cross each cut of a pipeline, unless each stage computes X_0 again (`repeat_encoder`).

    Source: Chen, Wei, Huang, Ding and Li, "Simple and Deep Graph Convolutional Networks",
    https://arxiv.org/abs/2007.02133

    Args:
        in_channels: Features of a node.
        hidden_channels: Channels of every layer.
        out_channels: Classes.
        num_layers: Graph convolutions, without the linear maps at both ends.
        dropout: Share of every layer's input that is zeroed in training.
        alpha: Weight of X_0 in each layer.
        theta: Strength of the layers' own weights; it fades with depth.

    Shapes:
        - input: x ``[num_nodes, in_channels]``, edge_index ``[2, num_edges]``
        - output: ``[num_nodes, out_channels]``
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        dropout: float = 0.5,
        alpha: float = 0.1,
        theta: float = 0.5,
    ) -> None:
        super().__init__()
        _check_layers(num_layers)
        self.lin_in = nn.Linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            GCN2Conv(hidden_channels, alpha, theta, layer=layer + 1, shared_weights=True)
            for layer in range(num_layers)
        )
        self.lin_out = nn.Linear(hidden_channels, out_channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x_0 = self.lin_in(self.dropout(x)).relu()
        for conv in self.convs:
            x = conv(self.dropout(x), x_0, edge_index).relu()
        return self.lin_out(self.dropout(x))


class ResGCNPlus(nn.Module):
    r"""A deep stack of pre-activation residual blocks between two linear maps.

    Each block computes, with mean-aggregating SAGEConv as its convolution,

        X' = X + conv(dropout(relu(norm(X))))

    and the head is a last norm, ReLU, dropout and a linear map.

    Source: Li, Xiong, Thabet and Ghanem, "DeeperGCN: All You Need to Train Deeper GCNs",
    section 3.3, https://arxiv.org/abs/2006.07739

    Args:
        in_channels: Features of a node.
        hidden_channels: Channels of every block.
        out_channels: Classes.
        num_layers: Residual blocks, without the linear maps at both ends.
        dropout: Share of every block's activation that is zeroed in training.
        norm: "layer", over the channels of one node (PyG's default mode averages over all nodes),
            or "batch", over all nodes.

    Shapes:
        - input: x ``[num_nodes, in_channels]``, edge_index ``[2, num_edges]``
        - output: ``[num_nodes, out_channels]``
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        dropout: float = 0.5,
        norm: Literal["layer", "batch"] = "layer",
    ) -> None:
        super().__init__()
        _check_layers(num_layers)
        self.lin_in = nn.Linear(in_channels, hidden_channels)
        self.norms = nn.ModuleList(_make_norm(norm, hidden_channels) for _ in range(num_layers))
        self.convs = nn.ModuleList(
            SAGEConv(hidden_channels, hidden_channels, aggr="mean") for _ in range(num_layers)
        )
        self.norm_out = _make_norm(norm, hidden_channels)
        self.lin_out = nn.Linear(hidden_channels, out_channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin_in(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(self.dropout(norm(x).relu()), edge_index)
        return self.lin_out(self.dropout(self.norm_out(x).relu()))


class GNN(nn.Module):
    r"""A stack of GCN, GraphSAGE or GAT layers.

    Each layer computes

        X' = dropout(relu(norm(conv(X) + skip(X))))

    where skip is a linear map, or absent. With skips, a final linear map returns the outputs (Luo,
    Shi and Wu). Without them, the last convolution does, without norm and ReLU (Kipf and Welling).

    Sources: Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks",
    https://arxiv.org/abs/1609.02907; Luo, Shi and Wu, "Classic GNNs are Strong Baselines",
    https://arxiv.org/abs/2406.08993

    Args:
        in_channels: Features of a node.
        hidden_channels: Channels between the layers.
        out_channels: Classes.
        num_layers: Graph convolutions, at least one.
        dropout: Share of the entries that is zeroed in training after each ReLU.
        conv: "gcn", "sage" (mean aggregation), or "gat" (one head).
        norm: "batch", over all nodes, "layer", over the channels of one node, or None.
        skip: Whether to add a linear map of the input to each convolution.
        input_dropout: Share of the features that is zeroed in training.

    Shapes:
        - input: x ``[num_nodes, in_channels]``, edge_index ``[2, num_edges]``
        - output: ``[num_nodes, out_channels]``
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        dropout: float = 0.5,
        *,
        conv: Literal["gcn", "sage", "gat"] = "gcn",
        norm: Literal["batch", "layer"] | None = None,
        skip: bool = False,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_layers(num_layers)
        convs = {"gcn": GCNConv, "sage": SAGEConv, "gat": GATConv}
        _check_choice("conv", conv, convs)
        num_inner = num_layers if skip else num_layers - 1
        widths = [in_channels] + [hidden_channels] * num_inner
        widths += [] if skip else [out_channels]
        self.convs = nn.ModuleList(convs[conv](*pair) for pair in pairwise(widths))
        self.norms = nn.ModuleList(_make_norm(norm, hidden_channels) for _ in range(num_inner))
        self.skips = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths) if skip)
        self.lin_out = nn.Linear(hidden_channels, out_channels) if skip else None
        self.input_dropout, self.dropout = nn.Dropout(input_dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.input_dropout(x)
        for layer, conv in enumerate(self.convs):
            h = conv(x, edge_index)
            if len(self.skips):
                h = h + self.skips[layer](x)
            x = self.dropout(self.norms[layer](h).relu()) if layer < len(self.norms) else h
        return x if self.lin_out is None else self.lin_out(x)


def _check_layers(num_layers: int) -> None:
    if num_layers < 1:
        raise ValueError(f"Expected 'num_layers' to be at least 1 (got {num_layers}).")


def _check_choice(name: str, value: str | None, known: Collection[str | None]) -> None:
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"Expected '{name}' to be one of {names} (got {value!r}).")


def _make_norm(norm: Literal["batch", "layer"] | None, channels: int) -> nn.Module:
    _check_choice("norm", norm, ("batch", "layer", None))
    if norm is None:
        return nn.Identity()
    return LayerNorm(channels, mode="node") if norm == "layer" else nn.BatchNorm1d(channels)
