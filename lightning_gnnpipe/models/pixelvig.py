"""PixelViG: the image-graph network of a pipeline study, for comparing step times."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GraphConv, global_add_pool

Norm = Literal["layer", "batch"]


class PixelViG(nn.Module):
    r"""ViG's blocks on the grid of an image's pixels; few channels between the blocks, many inside.

    Each block computes, with the sum over a pixel's neighbours in the grid,

        H  = norm(X W_in)
        Y  = X + norm(gelu(H W_self + sum(H[m] for each edge m -> n) W) W_out)
        X' = Y + norm(gelu(norm(Y W_1)) W_2)

    and a classifier with one hidden layer reads the sum over the image. Its defaults give the
    study's 1,120,410 parameters, 138,258 in each block. The study used norm="batch" on each
    micro-batch, and the edges of ``torch_geometric.utils.grid(32, 32)`` without self-loops. Use
    ``ViG`` for accuracy.

    Source: Raffi and Dazzi, University of Pisa, https://github.com/JacopoRaffi/DistributedGNN

    Args:
        in_channels: Colours of a pixel; channels between the blocks.
        out_channels: Classes.
        num_blocks: Blocks, each with one graph convolution.
        grapher_channels: Channels of the graph convolutions.
        feed_forward_channels: Channels inside the feed-forward networks.
        head_channels: Channels inside the classifier.
        norm: "layer", over the channels of one node, or "batch", over all nodes of the mini-batch,
            or of the micro-batch if there are several.

    Shapes:
        - input: x ``[num_nodes, in_channels]``, edge_index ``[2, num_edges]``, batch
          ``[num_nodes]``, in ascending order
        - output: ``[num_graphs, out_channels]``
    """

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 10,
        num_blocks: int = 8,
        *,
        grapher_channels: int = 256,
        feed_forward_channels: int = 512,
        head_channels: int = 1024,
        norm: Norm = "layer",
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(in_channels, grapher_channels, feed_forward_channels, norm)
            for _ in range(num_blocks)
        )
        self.head = Classifier(in_channels, head_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, edge_index)
        return self.head(x, batch)


class Block(nn.Module):
    """A graph convolution and a feed-forward network, each added to its input."""

    def __init__(
        self, channels: int, grapher_channels: int, feed_forward_channels: int, norm: Norm
    ) -> None:
        super().__init__()
        self.lin_in = _make_linear(channels, grapher_channels, norm)
        self.conv = GraphConv(grapher_channels, grapher_channels)
        self.lin_out = _make_linear(grapher_channels, channels, norm)
        self.feed_forward = nn.Sequential(
            _make_linear(channels, feed_forward_channels, norm),
            nn.GELU(),
            _make_linear(feed_forward_channels, channels, norm),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x + self.lin_out(F.gelu(self.conv(self.lin_in(x), edge_index)))
        return x + self.feed_forward(x)


class Classifier(nn.Module):
    """gelu(sum(X) W_1) W_2, the sum over the nodes of each graph."""

    def __init__(self, channels: int, inner_channels: int, out_channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(channels, inner_channels), nn.GELU(), nn.Linear(inner_channels, out_channels)
        )

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.mlp(global_add_pool(x, batch))


def _make_linear(channels_in: int, channels_out: int, norm: Norm) -> nn.Module:
    after = nn.LayerNorm(channels_out) if norm == "layer" else nn.BatchNorm1d(channels_out)
    return nn.Sequential(nn.Linear(channels_in, channels_out), after)
