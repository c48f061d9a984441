"""ViG: an image as a graph of its patches, each joined to the most similar ones."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import (
    EdgeConv,
    GINConv,
    MessagePassing,
    SAGEConv,
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
        self.head = Classifier(hidden_channels, out_channels)

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
        self.lin_in = nn.Sequential(nn.Linear(channels, channels), _make_norm(norm, channels))
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


class Classifier(nn.Module):
    """gelu(mean(X) W_1) W_2, the mean over the nodes of each graph."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, out_channels)
        )

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.mlp(global_mean_pool(x, batch))


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
