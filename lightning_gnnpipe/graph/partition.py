"""Partition nodes into chunks of equal weight with few cut edges.

METIS balances poorly on skewed graphs, so nodes are moved afterwards (see `balance.py`).
"""

from __future__ import annotations

from typing import get_args

import pymetis
import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.graph.balance import rebalance
from lightning_gnnpipe.graph.validate import check_assignment, check_num_chunks
from lightning_gnnpipe.types import Partition, PartitionMethod


def partition_nodes(
    edge_index: Tensor, num_nodes: int, *, num_chunks: int, method: Partition, seed: int = 0
) -> Tensor:
    """Return `[num_nodes]` the chunk of each node; no chunk is empty.

    `method`: "metis", "random", "contiguous" (ranges of node numbers), or the assignment itself.
    Chunks of the first two weigh at most 5 % more than the mean if single nodes allow it.
    """
    check_num_chunks(num_chunks, num_nodes)
    if isinstance(method, Tensor):
        check_assignment(method, num_nodes, num_chunks)
        return method.long().cpu()
    # The work of a node: its row and its in-edges.
    weights = 1 + torch.bincount(edge_index[1].long(), minlength=num_nodes)
    if num_chunks == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    if method == "contiguous":
        return _assign_nodes(torch.arange(num_nodes), weights, num_chunks)
    if method not in get_args(PartitionMethod):
        raise ConfigError(
            explain(
                expected="'partition' to be 'metis', 'random', 'contiguous' or a tensor",
                found=repr(method),
                remedy="Choose one of them.",
            )
        )
    links = _symmetrize(edge_index, num_nodes)
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_nodes, generator=generator)
        assignment = _assign_nodes(order, weights, num_chunks)
    else:
        assignment = _metis(links, weights, num_chunks, seed)
    return rebalance(assignment, weights, links, num_chunks)


def _metis(links: Tensor, weights: Tensor, num_chunks: int, seed: int) -> Tensor:
    num_nodes = weights.numel()
    starts = torch.zeros(num_nodes + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(links[0], minlength=num_nodes).cumsum(0)
    adjacency = pymetis.CSRAdjacency(
        starts.to(torch.int32).numpy(), links[1].to(torch.int32).numpy()
    )
    _, parts = pymetis.part_graph(
        num_chunks,
        adjacency=adjacency,
        vweights=weights.to(torch.int32).numpy(),
        options=pymetis.Options(seed=seed % (1 << 31)),
    )
    return torch.as_tensor(parts, dtype=torch.int64)


def _symmetrize(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return each pair of linked nodes once per direction, without self-loops, sorted."""
    source, target = edge_index.long()
    is_proper = source != target
    source, target = source[is_proper], target[is_proper]
    keys = torch.unique(torch.cat([source * num_nodes + target, target * num_nodes + source]))
    return torch.stack(
        [torch.div(keys, max(num_nodes, 1), rounding_mode="floor"), keys % max(num_nodes, 1)]
    )


def _assign_nodes(order: Tensor, weights: Tensor, num_chunks: int) -> Tensor:
    """Cut the nodes, in this order, into non-empty runs of about equal weight."""
    ordered = weights[order].double()
    total = ordered.cumsum(0)
    targets = total[-1] * torch.arange(1, num_chunks) / num_chunks
    cuts = torch.searchsorted(total - ordered / 2, targets).tolist()
    for i in range(num_chunks - 1):  # leave at least one node for each run
        least = cuts[i - 1] + 1 if i else 1
        cuts[i] = min(max(cuts[i], least), order.numel() - (num_chunks - 1 - i))
    assignment = torch.empty_like(order)
    for chunk, nodes in enumerate(order.tensor_split(cuts)):
        assignment[nodes] = chunk
    return assignment
