"""How much of a graph a partition cuts, and what graph parallelism over it would send."""

from __future__ import annotations

import torch
from torch import Tensor


def edge_cut_frac(edge_index: Tensor, assignment: Tensor) -> float:
    """Return the share of the edges whose ends lie in different parts; 0 without edges."""
    if edge_index.size(1) == 0:
        return 0.0
    source, target = assignment[edge_index.long()]
    return float((source != target).double().mean())


def replicas_per_node(edge_index: Tensor, num_nodes: int, assignment: Tensor) -> float:
    """Return alpha: remote source nodes, each counted once a part, over the number of nodes.

    It is what graph parallelism sends in rows a node, for each layer and direction.
    """
    source = edge_index[0].long()
    part = assignment[edge_index[1].long()]
    is_remote = assignment[source] != part
    pairs = torch.unique(part[is_remote] * num_nodes + source[is_remote])
    return pairs.numel() / num_nodes
