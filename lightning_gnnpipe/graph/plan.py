"""Building a plan: chunk-contiguous nodes, edges in the chunk they end in, halos, local numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnnpipe.graph.chunk import Chunk, ChunkPlan
from lightning_gnnpipe.graph.partition import partition_nodes
from lightning_gnnpipe.graph.validate import check_assignment, check_graph
from lightning_gnnpipe.types import Partition


def build_chunk_plan(
    edge_index: Tensor,
    num_nodes: int,
    *,
    num_chunks: int,
    partition: Partition = "metis",
    seed: int = 0,
) -> ChunkPlan:
    """Cut a graph into chunks.

    Args:
        edge_index: `[2, num_edges]` sources and targets; multi-edges and self-loops are kept as
            they are.
        num_nodes: Nodes, N.
        num_chunks: Chunks, K, at most N.
        partition: A method, or `[num_nodes]` the chunk of each node.
        seed: Seed of the methods.

    Raises:
        GraphError: If the graph or the partition is malformed.
        ConfigError: If `num_chunks` is not between 1 and N.
    """
    check_graph(edge_index, num_nodes)
    assignment = partition_nodes(
        edge_index, num_nodes, num_chunks=num_chunks, method=partition, seed=seed
    )
    return plan_from_assignment(edge_index, num_nodes, assignment)


def trivial_plan(edge_index: Tensor, num_nodes: int) -> ChunkPlan:
    """Return the plan of one chunk, nodes in the user's order."""
    return plan_from_assignment(edge_index, num_nodes, torch.zeros(num_nodes, dtype=torch.int64))


def plan_from_assignment(edge_index: Tensor, num_nodes: int, assignment: Tensor) -> ChunkPlan:
    """Return the plan in which node `n` lies in chunk `assignment[n]`.

    Args:
        edge_index: `[2, num_edges]`.
        num_nodes: Nodes, N.
        assignment: `[num_nodes]` chunk numbers from 0, without gaps.

    Raises:
        GraphError: If a chunk has no node.
    """
    num_chunks = int(assignment.max()) + 1 if num_nodes else 0
    check_assignment(assignment, num_nodes, num_chunks)
    perm = assignment.argsort(stable=True)
    position = torch.empty_like(perm)
    position[perm] = torch.arange(num_nodes)
    edges = position[edge_index.long()]
    edge_perm = edges[1].argsort(stable=True)
    edges = edges[:, edge_perm]
    sizes = torch.bincount(assignment.long(), minlength=num_chunks)
    ends = sizes.cumsum(0)
    edge_ends = torch.searchsorted(edges[1].contiguous(), ends)
    chunks = tuple(_cut(edges, ends, edge_ends))
    whole = Chunk(0, 0, num_nodes, perm.new_empty(0), (), (), 0, edges.size(1), edges.contiguous())
    return ChunkPlan(num_nodes, edges.size(1), perm, edge_perm, chunks, whole)


def _cut(edges: Tensor, ends: Tensor, edge_ends: Tensor) -> Iterator[Chunk]:
    """Yield the chunks of `edges`, `[2, num_edges]` positions sorted by target."""
    start, edge_start = 0, 0
    for index, (end, edge_end) in enumerate(zip(ends.tolist(), edge_ends.tolist(), strict=True)):
        source, target = edges[:, edge_start:edge_end]
        is_outside = (source < start) | (source >= end)
        halo, place = torch.unique(source[is_outside], return_inverse=True)
        local = source - start
        local[is_outside] = place + (end - start)
        owners, counts = torch.unique(
            torch.searchsorted(ends, halo, right=True), return_counts=True
        )
        yield Chunk(
            index,
            start,
            end,
            halo,
            tuple(owners.tolist()),
            tuple(counts.tolist()),
            edge_start,
            edge_end,
            torch.stack([local, target - start]),
        )
        start, edge_start = end, edge_end
