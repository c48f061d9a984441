"""A graph with classes to learn, made in memory, for examples and for measurements of speed."""

from __future__ import annotations

import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from lightning_gnnpipe.datamodule import draw_masks
from lightning_gnnpipe.errors import ConfigError

_REACH_FRAC = 0.01  # how far most neighbours are, of all nodes
_FAR_FRAC = 0.03  # of edges that lead anywhere
_NOISE = 6.0  # of the features, whose classes are sqrt(2 num_features) apart


def make_communities(
    num_nodes: int,
    *,
    num_classes: int = 8,
    num_features: int = 64,
    avg_degree: int = 10,
    seed: int = 0,
) -> Data:
    """Return a graph of communities on a ring: neighbours are near, and mostly of one class.

    The features of one node say little about its class; its surroundings say more.

    Args:
        num_nodes: Nodes, N.
        num_classes: Classes, each a run of consecutive nodes.
        num_features: Features of a node: the mean of its class and noise.
        avg_degree: Neighbours of a node, about; an even number.
        seed: Equal seeds give equal graphs.

    Returns:
        ``x`` of shape [N, num_features], an undirected ``edge_index`` of shape
        [2, about N avg_degree], ``y`` of shape [N], and the masks that ``FullGraphDataModule``
        draws with this seed: 60 % of the nodes train, 20 % validate, 20 % test.

    Raises:
        ConfigError: There are fewer than 100 nodes, or ``avg_degree`` is less than 2.

    Examples:
        >>> from lightning_gnnpipe import make_communities
        >>> data = make_communities(1000)
    """
    if num_nodes < 100 or avg_degree < 2:
        raise ConfigError(
            expected="num_nodes of at least 100 and avg_degree of at least 2",
            found=f"{num_nodes} and {avg_degree}",
            remedy="Write make_communities(20_000, avg_degree=10).",
        )
    draw = torch.Generator().manual_seed(seed)
    source = torch.arange(num_nodes).repeat_interleave(avg_degree // 2)
    steps = torch.randint(1, 1 + int(_REACH_FRAC * num_nodes), source.shape, generator=draw)
    anywhere = torch.randint(num_nodes, source.shape, generator=draw)
    is_far = torch.rand(source.shape, generator=draw) < _FAR_FRAC
    target = torch.where(is_far, anywhere, (source + steps) % num_nodes)
    y = torch.arange(num_nodes) * num_classes // num_nodes
    centres = torch.randn(num_classes, num_features, generator=draw)
    x = centres[y] + _NOISE * torch.randn(num_nodes, num_features, generator=draw)
    edge_index = to_undirected(torch.stack([source, target]), num_nodes=num_nodes)
    data = Data(x=x, edge_index=edge_index, y=y)
    draw_masks(data, (0.6, 0.2, 0.2), seed)
    return data
