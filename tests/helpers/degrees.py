"""Helpers of a network in a file of their own."""

from __future__ import annotations

import torch_geometric.utils
from torch import Tensor
from torch_geometric.utils import degree


def add_degrees(x: Tensor, edge_index: Tensor) -> Tensor:
    """Return `x`, scaled by the in-degree of each node."""
    counts = degree(edge_index[1], x.size(0), dtype=x.dtype)
    again = torch_geometric.utils.degree(edge_index[1], x.size(0), dtype=x.dtype)
    return x / (1 + counts + again).unsqueeze(-1)
