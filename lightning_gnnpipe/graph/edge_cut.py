"""How much of a graph a partition cuts, and what graph parallelism over it would send."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SplitSizes:
    """How large the pieces are into which shards split chunks; all are `[num_chunks, num_shards]`.

    Attributes:
        nodes: Nodes of each piece.
        edges: Edges that end in it.
        sent: Rows of it that other shards read, once for each.
        received: Rows of the same chunk in other shards that its shard reads.
        peers: Other shards that it sends rows to or gets rows of the chunk from, whichever are
            more.
    """

    nodes: Tensor
    edges: Tensor
    sent: Tensor
    received: Tensor
    peers: Tensor


def measure_split(
    edge_index: Tensor, assignment: Tensor, shards: Tensor, num_shards: int
) -> SplitSizes:
    """Return the sizes of the pieces of a graph, and what shards swap whenever a chunk is written.

    Args:
        edge_index: `[2, num_edges]`.
        assignment: `[num_nodes]` the chunk of each node.
        shards: `[num_nodes]` the shard of each node.
        num_shards: Shards, G.
    """
    source, target = edge_index.long()
    num_nodes, num_chunks = assignment.numel(), int(assignment.max()) + 1
    piece = assignment * num_shards + shards
    is_remote = shards[source] != shards[target]
    pairs = torch.unique(shards[target][is_remote] * num_nodes + source[is_remote])
    reader, read = pairs // num_nodes, pairs % num_nodes

    chunk, owner = assignment[read], shards[read]
    links = torch.unique((chunk * num_shards + owner) * num_shards + reader)  # pieces and readers
    sends, gets = links // num_shards, links // num_shards**2 * num_shards + links % num_shards

    def count(pieces: Tensor) -> Tensor:
        sizes = torch.bincount(pieces, minlength=num_chunks * num_shards)
        return sizes.view(num_chunks, num_shards)

    return SplitSizes(
        nodes=count(piece),
        edges=count(piece[target]),
        sent=count(piece[read]),
        received=count(chunk * num_shards + reader),
        peers=torch.maximum(count(sends), count(gets)),
    )


def edges_within(edge_index: Tensor, assignment: Tensor) -> Tensor:
    """Return `[num_kept]` the edges whose ends lie in the same part, ascending."""
    source, target = assignment[edge_index.long()]
    return (source == target).nonzero().flatten()


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
