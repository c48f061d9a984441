"""A network of one's own, for `own_net.yaml`: plain PyG, written for one device."""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv


class ResidualGAT(nn.Module):
    """Attention layers between two linear maps, each added to what it reads.

    Args:
        in_channels: Features of a node.
        hidden_channels: Channels of every layer, a multiple of `heads`.
        out_channels: Classes.
        num_layers: Attention layers.
        heads: Attention heads of a layer.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 8,
        heads: int = 2,
    ) -> None:
        super().__init__()
        self.lin_in = nn.Linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            GATv2Conv(hidden_channels, hidden_channels // heads, heads) for _ in range(num_layers)
        )
        self.lin_out = nn.Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin_in(x)
        for conv in self.convs:
            x = x + conv(x.relu(), edge_index)
        return self.lin_out(x)
