"""Networks for images as graphs: ViG on patches, PixelViG on pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import (
    EdgeConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.utils import to_dense_batch

Conv = Literal["max_relative", "edge", "gin", "sage"]
Norm = Literal["layer", "batch"]


class ViG(nn.Module):
    r"""Vision GNN in its isotropic form: a stem, equal blocks, a classifier.

    Each block computes, with edges E(H) from every node's `num_neighbours` most similar nodes of
    the same image, itself included,

        H  = norm(X W_in)
        Y  = X + norm(gelu(conv(H, E(H))) W_out)          Grapher
        X' = Y + norm(gelu(norm(Y W_1)) W_2)              feed-forward network

    The classifier reads the mean over an image's nodes. All blocks use as many neighbours, without
    dilation. With its defaults, 48 features (4 x 4 pixels of 3 colours), 96 channels and a grid of
    8 x 8, it has 1.14 million parameters.

    Source: Han, Wang, Guo, Tang and Wu, "Vision GNN: An Image is Worth Graph of Nodes",
    https://arxiv.org/abs/2206.00272

    Args:
        in_channels: Features of a node: the pixels of a patch.
        hidden_channels: Channels of every block.
        out_channels: Classes.
        num_blocks: Blocks, each with one graph convolution.
        dropout: Share of each branch's output that is zeroed in training, before it is added to X.
        num_neighbours: Neighbours of a node, itself included; smaller images have fewer.
        grid: Rows and columns of an image's patches, nodes in row-major order. The stem convolves
            over 3 x 3 patches, which encodes positions. None for graphs of any size, without
            positions.
        conv: "max_relative", "edge" (EdgeConv), "gin" or "sage", the four that the paper compares.
        norm: "layer", over the channels of one node, or "batch", over all nodes of the mini-batch,
            or of the micro-batch if there are several.

    Raises:
        ValueError: The nodes of the mini-batch do not fill grids.

    Shapes:
        - input: x ``[num_nodes, in_channels]``, batch ``[num_nodes]``, in ascending order
        - output: ``[num_graphs, out_channels]``
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_blocks: int = 8,
        dropout: float = 0.0,
        *,
        num_neighbours: int = 9,
        grid: tuple[int, int] | None = None,
        conv: Conv = "max_relative",
        norm: Norm = "layer",
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Linear(in_channels, hidden_channels)
            if grid is None
            else GridConv(in_channels, hidden_channels, grid),
            _make_norm(norm, hidden_channels),
        )
        self.graphers = nn.ModuleList(
            Grapher(hidden_channels, num_neighbours, conv, norm, dropout) for _ in range(num_blocks)
        )
        self.feed_forwards = nn.ModuleList(
            FeedForward(hidden_channels, norm, dropout) for _ in range(num_blocks)
        )
        self.head = Classifier(hidden_channels, hidden_channels, out_channels, global_mean_pool)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        x = self.stem(x)
        for grapher, feed_forward in zip(self.graphers, self.feed_forwards, strict=True):
            x = feed_forward(grapher(x, batch))
        return self.head(x, batch)


class Grapher(nn.Module):
    """X + norm(gelu(conv(norm(X W_in), edges)) W_out), edges between the most similar rows."""

    def __init__(
        self, channels: int, num_neighbours: int, conv: Conv, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.lin_in = _make_linear(channels, channels, norm)
        self.neighbours = NearestNeighbours(num_neighbours)
        self.conv = _make_conv(conv, channels, 2 * channels)
        self.lin_out = nn.Sequential(
            nn.GELU(),
            nn.Linear(2 * channels, channels),
            _make_norm(norm, channels),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        h = self.lin_in(x)
        return x + self.lin_out(self.conv(h, self.neighbours(h, batch)))


class FeedForward(nn.Module):
    """X + norm(gelu(norm(X W_1)) W_2), row by row."""

    def __init__(self, channels: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Linear(channels, 4 * channels),
            _make_norm(norm, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            _make_norm(norm, channels),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class NearestNeighbours(nn.Module):
    """Join every node to the most similar nodes of its graph (cosine), itself included.

    A graph of fewer than ``num_neighbours`` nodes is joined completely. Graphs are padded to the
    largest, so time and memory grow with the square of its size.

    Shapes:
        - input: x ``[num_nodes, channels]``, batch ``[num_nodes]``, in ascending order
        - output: edge_index ``[2, num_edges]``, neighbours to node, ordered by node
    """

    def __init__(self, num_neighbours: int) -> None:
        super().__init__()
        self.num_neighbours = num_neighbours

    @torch.no_grad()
    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        directions, is_node = to_dense_batch(F.normalize(x, dim=-1), batch)
        similarity = directions @ directions.mT  # [num_graphs, largest, largest]
        similarity.masked_fill_(~is_node[:, None, :], -torch.inf)
        num_found = min(self.num_neighbours, similarity.size(-1))
        found, place = similarity.topk(num_found, dim=-1)

        sizes = is_node.sum(dim=1)
        first = sizes.cumsum(0) - sizes  # number of each graph's first node
        source = place + first[:, None, None]
        target = first[:, None] + torch.arange(is_node.size(1), device=x.device)
        is_edge = is_node[:, :, None] & (found > -torch.inf)
        return torch.stack([source[is_edge], target[:, :, None].expand_as(source)[is_edge]])


class MaxRelativeConv(MessagePassing):  # type: ignore[misc]
    """[X[n], max(X[m] - X[n] for each edge m -> n)] W + b, the maximum channel by channel."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(2 * in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(torch.cat([x, self.propagate(edge_index, x=x)], dim=-1))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j - x_i


class GridConv(nn.Module):
    """X W plus its depthwise 3 x 3 convolution, zero padded, over the grid of each image."""

    def __init__(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.lin = nn.Linear(in_channels, out_channels)
        self.conv = nn.Conv2d(
            out_channels, out_channels, kernel_size=3, padding=1, groups=out_channels
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.grid
        num_images, rest = divmod(x.size(0), rows * columns)
        if rest:
            raise ValueError(
                f"Expected images of {rows} x {columns} nodes each (got {x.size(0)} nodes). Set "
                "'grid' to the rows and columns of an image's patches, or to None for graphs of "
                "other shapes."
            )
        x = self.lin(x)
        images = x.view(num_images, rows, columns, x.size(1)).permute(0, 3, 1, 2)
        return x + self.conv(images).permute(0, 2, 3, 1).reshape(x.shape)


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
            PixelBlock(in_channels, grapher_channels, feed_forward_channels, norm)
            for _ in range(num_blocks)
        )
        self.head = Classifier(in_channels, head_channels, out_channels, global_add_pool)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, edge_index)
        return self.head(x, batch)


class PixelBlock(nn.Module):
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
    """gelu(pool(X) W_1) W_2, the mean or the sum over the nodes of each graph."""

    def __init__(
        self, channels: int, inner_channels: int, out_channels: int, pool: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.pool = pool
        self.mlp = nn.Sequential(
            nn.Linear(channels, inner_channels), nn.GELU(), nn.Linear(inner_channels, out_channels)
        )

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.mlp(self.pool(x, batch))


def _make_conv(conv: Conv, in_channels: int, out_channels: int) -> MessagePassing:
    if conv == "max_relative":
        return MaxRelativeConv(in_channels, out_channels)
    if conv == "edge":
        return EdgeConv(nn.Sequential(nn.Linear(2 * in_channels, out_channels), nn.GELU()))
    if conv == "gin":
        return GINConv(nn.Linear(in_channels, out_channels), train_eps=True)
    return SAGEConv(in_channels, out_channels, aggr="max", project=True)


def _make_norm(norm: Norm, channels: int) -> nn.Module:
    return nn.LayerNorm(channels) if norm == "layer" else nn.BatchNorm1d(channels)


def _make_linear(channels_in: int, channels_out: int, norm: Norm) -> nn.Module:
    return nn.Sequential(nn.Linear(channels_in, channels_out), _make_norm(norm, channels_out))
