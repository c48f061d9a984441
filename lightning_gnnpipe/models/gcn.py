"""GCN: graph convolutions, one after the other, with nothing between them that helps depth."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch_geometric.nn import GCNConv


class GCN(nn.Module):
    r"""A stack of graph convolutions with ReLU between them.

    Each layer computes, with the self-looped adjacency and its degrees,

        X' = relu(D^-1/2 A D^-1/2 dropout(X) W + b)

    and the last one leaves out the ReLU. Plain GCNs lose accuracy beyond a few layers; for deep
    networks take ``GCNII`` or ``ResGCNPlus``.

    Source: Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks",
    https://arxiv.org/abs/1609.02907

    Args:
        in_channels: Features of a node.
        hidden_channels: Channels between the layers.
        out_channels: Classes.
        num_layers: Graph convolutions, at least one.
        dropout: Share of every layer's input that is zeroed in training.

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
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList(
            GCNConv(width_in, width_out) for width_in, width_out in pairwise(widths)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        last = len(self.convs) - 1
        for layer, conv in enumerate(self.convs):
            x = conv(self.dropout(x), edge_index)
            if layer < last:
                x = x.relu()
        return x
