"""GraphSAGE: every layer adds a map of a node's own row to a map of its neighbours' mean."""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.nn import SAGEConv


class GraphSAGE(nn.Module):
    r"""A stack of GraphSAGE layers with mean aggregation between two linear maps.

    Each layer computes

        X'[n] = dropout(relu(W_self X[n] + W mean(X[m] for each edge m -> n)))

    SAGEConv aggregates before it transforms, so the features are mapped to ``hidden_channels``
    first: no layer then aggregates rows that are wider than that.

    Source: Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs",
    https://arxiv.org/abs/1706.02216

    Args:
        in_channels: Features of a node.
        hidden_channels: Channels of every layer.
        out_channels: Classes.
        num_layers: GraphSAGE layers; the linear maps at both ends are not counted.
        dropout: Share of the rows' entries that is zeroed in training, after each ReLU.

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
    ) -> None:
        super().__init__()
        self.lin_in = nn.Linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            SAGEConv(hidden_channels, hidden_channels, aggr="mean") for _ in range(num_layers)
        )
        self.lin_out = nn.Linear(hidden_channels, out_channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.dropout(self.lin_in(x).relu())
        for conv in self.convs:
            x = self.dropout(conv(x, edge_index).relu())
        return self.lin_out(x)
