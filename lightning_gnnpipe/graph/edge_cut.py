"""Edges that a partition cuts, and the rows that graph parallelism sends for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SplitSizes:
    """Sizes of the pieces of chunks in shards; each is `[num_chunks, num_shards]`."""

    nodes: Tensor
    edges: Tensor  # that end in the piece
    sent: Tensor  # rows of the piece that other shards read, counted once per reader
    received: Tensor  # rows of the chunk in other shards that this shard reads
    peers: Tensor  # shards sent to, or shards received from, whichever are more


def measure_split(
    edge_index: Tensor, assignment: Tensor, shards: Tensor, num_shards: int
) -> SplitSizes:
    """Return the sizes of all pieces, and the rows exchanged whenever a chunk is written."""
    source, target = edge_index.long()
    num_nodes, num_chunks = assignment.numel(), int(assignment.max()) + 1
    piece = assignment * num_shards + shards
    is_remote = shards[source] != shards[target]
    pairs = torch.unique(shards[target][is_remote] * num_nodes + source[is_remote])
    reader, read = pairs // num_nodes, pairs % num_nodes

    chunk, owner = assignment[read], shards[read]
    links = torch.unique((chunk * num_shards + owner) * num_shards + reader)  # (piece, reader)
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
    """Return `[num_kept]` the edges with both ends in one part, ascending."""
    source, target = assignment[edge_index.long()]
    return (source == target).nonzero().flatten()


def edge_cut_frac(edge_index: Tensor, assignment: Tensor) -> float:
    """Return the fraction of edges between different parts; 0 without edges."""
    if edge_index.size(1) == 0:
        return 0.0
    source, target = assignment[edge_index.long()]
    return float((source != target).double().mean())


def replicas_per_node(edge_index: Tensor, num_nodes: int, assignment: Tensor) -> float:
    """Return alpha: remote source nodes, counted once per part, divided by the number of nodes.

    Graph parallelism sends alpha rows per node in each layer and direction.
    """
    source = edge_index[0].long()
    part = assignment[edge_index[1].long()]
    is_remote = assignment[source] != part
    pairs = torch.unique(part[is_remote] * num_nodes + source[is_remote])
    return pairs.numel() / num_nodes
