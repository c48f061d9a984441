"""Split every chunk over the shards, with few edges between shards.

Chunks are the same for any number of shards, so staleness is too. METIS cuts each chunk into parts
of equal weight. Parts are then matched to shards so that neighbors in different chunks share one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.graph.partition import partition_nodes

_NUM_SWEEPS = 3


def split_chunks(
    edge_index: Tensor, assignment: Tensor, num_shards: int, *, seed: int = 0
) -> Tensor:
    """Return `[num_nodes]` the shard of each node, given its chunk; no shard is empty."""
    num_nodes = assignment.numel()
    if num_nodes < num_shards:
        raise ConfigError(
            explain(
                expected=f"'graph_parallel' to be at most the number of nodes, {num_nodes}",
                found=str(num_shards),
                remedy="Use fewer devices: the graph is small.",
            )
        )
    num_chunks = int(assignment.max()) + 1
    part = torch.empty_like(assignment)
    inside = assignment[edge_index[0]] == assignment[edge_index[1]]
    edges = edge_index[:, inside]
    chunk_of_edge = assignment[edges[1]]
    number = torch.empty_like(assignment)
    for chunk in range(num_chunks):
        nodes = (assignment == chunk).nonzero().flatten()
        number[nodes] = torch.arange(nodes.numel())
        if nodes.numel() < num_shards:  # too few for all shards: assign in turn
            part[nodes] = (number[nodes] + chunk) % num_shards
            continue
        part[nodes] = partition_nodes(
            number[edges[:, chunk_of_edge == chunk]],
            nodes.numel(),
            num_chunks=num_shards,
            method="metis",
            seed=seed,
        )
    return _fill_empty(_align(edge_index, assignment, part, num_shards), num_shards)


def _align(edge_index: Tensor, assignment: Tensor, part: Tensor, num_shards: int) -> Tensor:
    """Return the shard of each node: parts of a chunk are permuted to cut fewer edges."""
    num_chunks = int(assignment.max()) + 1
    piece = assignment * num_shards + part
    num_pieces = num_chunks * num_shards
    source, target = piece[edge_index[0]], piece[edge_index[1]]
    keys, counts = torch.unique(source * num_pieces + target, return_counts=True)
    links = torch.zeros(num_pieces, num_pieces, dtype=torch.int64)
    links[keys // num_pieces, keys % num_pieces] = counts
    links = links + links.t()
    sizes = torch.bincount(piece, minlength=num_pieces)
    shard = torch.arange(num_pieces) % num_shards
    for _ in range(_NUM_SWEEPS):
        for chunk in range(num_chunks):
            own = slice(chunk * num_shards, (chunk + 1) * num_shards)
            if sizes[own].min() == 0:  # an empty part: keep the shards assigned in turn
                continue
            others = links[own].clone()
            others[:, own] = 0
            gain = torch.zeros(num_shards, num_shards, dtype=torch.int64)
            gain.index_add_(1, shard, others)
            shard[own] = _match(gain)
    return shard[piece]


def _fill_empty(shard: Tensor, num_shards: int) -> Tensor:
    """Move a node of the largest shard into each empty one."""
    counts = torch.bincount(shard, minlength=num_shards)
    for empty in (counts == 0).nonzero().flatten().tolist():
        largest = int(counts.argmax())
        shard[(shard == largest).nonzero()[0]] = empty
        counts[largest] -= 1
        counts[empty] += 1
    return shard


def _match(gain: Tensor) -> Tensor:
    """Return a different column for each row, largest entries first."""
    size = gain.size(0)
    found = torch.full((size,), -1)
    left = gain.clone()
    for _ in range(size):
        row, column = divmod(int(left.argmax()), size)
        found[row] = column
        left[row], left[:, column] = -1, -1
    return found
