"""GAT: neighbours weighed by attention, the weights computed from both ends of an edge."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv


class GAT(nn.Module):
    r"""A stack of graph attention layers with ELU between them.

    Each layer computes, for each of its heads and with the attention a over a node's neighbours
    and itself, of which dropout leaves out a share too,

        X'[n] = elu(sum(a[m, n] W dropout(X)[m]))

    and joins the heads; the last one takes the mean of its heads and leaves out the ELU. The
    defaults are those of the paper for Cora and CiteSeer, under Adam with a learning rate of 0.005
    and a weight decay of 5e-4; for PubMed it has ``out_heads=8``.

    Source: Velickovic, Cucurull, Casanova, Romero, Lio and Bengio, "Graph Attention Networks",
    https://arxiv.org/abs/1710.10903

    Args:
        in_channels: Features of a node.
        hidden_channels: Channels of each head between the layers.
        out_channels: Classes.
        num_layers: Graph attention layers, at least one.
        dropout: Share of every layer's input, and of its attention, that is zeroed in training.
        heads: Heads of all layers but the last.
        out_heads: Heads of the last layer.

    Shapes:
        - input: x ``[num_nodes, in_channels]``, edge_index ``[2, num_edges]``
        - output: ``[num_nodes, out_channels]``
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.6,
        heads: int = 8,
        out_heads: int = 1,
    ) -> None:
        super().__init__()
        joined = heads * hidden_channels
        widths_in = [in_channels] + [joined] * (num_layers - 1)
        self.convs = nn.ModuleList(
            GATConv(width, hidden_channels, heads, dropout=dropout) for width in widths_in[:-1]
        )
        self.convs.append(
            GATConv(widths_in[-1], out_channels, out_heads, concat=False, dropout=dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        last = len(self.convs) - 1
        for layer, conv in enumerate(self.convs):
            x = conv(self.dropout(x), edge_index)
            if layer < last:
                x = F.elu(x)
        return x
