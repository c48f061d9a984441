"""Cutting edges by the chunk they end in, with local numbers and halos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.graph.chunk import Chunk


@dataclass(frozen=True, slots=True, eq=False)
class _Local:
    """Local numbers and halos of all chunks, one after the other.

    Attributes:
        edges: `[2, num_edges]` local numbers.
        halos: `[sum of num_halo]` positions, ascending within a chunk.
        halo_ends: `[num_chunks]` the end of each chunk's halo in `halos`.
        rows: For each chunk the rows that it reads of each other chunk.
    """

    edges: Tensor
    halos: Tensor
    halo_ends: Tensor
    rows: list[dict[int, int]]


def cut_edges(edges: Tensor, ends: Tensor, edge_ends: Tensor) -> Iterator[Chunk]:
    """Yield the chunks of `edges`, `[2, num_edges]` positions sorted by target."""
    local = _number(edges, ends)
    start, halo_start, edge_start = 0, 0, 0
    bounds = zip(ends.tolist(), local.halo_ends.tolist(), edge_ends.tolist(), strict=True)
    for index, (end, halo_end, edge_end) in enumerate(bounds):
        yield Chunk(
            index=index,
            start=start,
            end=end,
            halo=local.halos[halo_start:halo_end].clone(),
            halo_chunks=tuple(local.rows[index]),
            halo_counts=tuple(local.rows[index].values()),
            edge_start=edge_start,
            edge_end=edge_end,
            edge_index=torch.stack([row[edge_start:edge_end] for row in local.edges]),
        )
        start, halo_start, edge_start = end, halo_end, edge_end


def _number(edges: Tensor, ends: Tensor) -> _Local:
    """Number the nodes of each chunk: its own first, then its halo.

    All halos come from one sort of (reader, source) pairs and not from a pass a chunk: a few large
    operations take the same time for any number of chunks.
    """
    num_chunks, num_nodes = ends.numel(), int(ends[-1])
    sizes = ends.diff(prepend=ends.new_zeros(1))
    owner = torch.repeat_interleave(torch.arange(num_chunks, device=ends.device), sizes)
    source, target = edges
    chunk_of_edge = owner[target]
    start_of_edge = (ends - sizes)[chunk_of_edge]
    local = source - start_of_edge
    outside = (owner[source] != chunk_of_edge).nonzero().flatten()
    reader = chunk_of_edge[outside]
    pairs, place = torch.unique(reader * num_nodes + source[outside], return_inverse=True)
    halos, readers = pairs % num_nodes, pairs // num_nodes
    num_halo = torch.bincount(readers, minlength=num_chunks)
    halo_ends = num_halo.cumsum(0)
    local[outside] = place + (sizes - halo_ends + num_halo)[reader]
    return _Local(
        edges=torch.stack([local, target - start_of_edge]),
        halos=halos,
        halo_ends=halo_ends,
        rows=_count_rows(readers, owner[halos], num_chunks),
    )


def _count_rows(readers: Tensor, owners: Tensor, num_chunks: int) -> list[dict[int, int]]:
    """Return for each chunk the chunks its halo lies in, ascending, and the rows in each."""
    pairs, counts = torch.unique(readers * num_chunks + owners, return_counts=True)
    rows: list[dict[int, int]] = [{} for _ in range(num_chunks)]
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        rows[pair // num_chunks][pair % num_chunks] = count
    return rows
