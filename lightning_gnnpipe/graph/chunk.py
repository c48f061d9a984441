"""Chunks: blocks of nodes, each with all edges that end in it.

A node's *position* is its place in chunk-contiguous order. A chunk numbers its own nodes first,
then its halo, the sources of its edges that lie outside:

    positions     0 1 2 3 | 4 5 6 | 7 8          chunk 1 = positions 4, 5, 6, halo = 1, 8
    chunk 1       local 0 1 2 = positions 4 5 6,  local 3 4 = positions 1 8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """Rows of a chunk that are exchanged with another shard whenever the chunk is written.

    Attributes:
        shard: The other shard.
        send: `[num_sent]` rows that the other shard reads, counted from the chunk's first.
        receive: `[num_received]` ghost rows that store the rows received.
    """

    shard: int
    send: Tensor
    receive: Tensor


@dataclass(frozen=True, eq=False)
class Chunk:
    """A block of nodes with all edges that end in it.

    Attributes:
        start: First position; `end` is the position after the last.
        halo: `[num_halo]` positions of the sources outside, ascending.
        halo_chunks: Chunks of the halo, in its order. With shards, a chunk may occur per shard.
        halo_counts: Halo rows in each of `halo_chunks`.
        edge_start: First slot of its edges in the plan's order; `edge_end` is after the last.
        edge_index: `[2, num_edges]` local numbers; targets are below `num_nodes`.
        peers: The other shards; empty without shards.
        is_whole: Whether it is the only chunk of its plan.
    """

    index: int
    start: int
    end: int
    halo: Tensor
    halo_chunks: tuple[int, ...]
    halo_counts: tuple[int, ...]
    edge_start: int
    edge_end: int
    edge_index: Tensor
    peers: tuple[Peer, ...] = ()
    is_whole: bool = False

    @cached_property
    def num_nodes(self) -> int:
        return self.end - self.start

    @cached_property
    def num_halo(self) -> int:
        return self.halo.numel()

    @cached_property
    def num_edges(self) -> int:
        return self.edge_end - self.edge_start

    def with_edges(self, keep: Tensor) -> Chunk:
        """Return the chunk with the edges in `keep`, a mask over all slots, and the same halo."""
        own = keep[self.edge_start : self.edge_end]
        start, count = int(keep[: self.edge_start].sum()), int(own.sum())
        edge_index = self.edge_index[:, own]
        return replace(self, edge_start=start, edge_end=start + count, edge_index=edge_index)


def moved(value: Any, device: torch.device | str) -> Any:
    """Return a tensor, or a tuple or dataclass with tensors in it, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(one, device) for one in value)
    if not is_dataclass(value):
        return value
    found = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
    return replace(value, **found)  # type: ignore[type-var]


def cut_edges(edges: Tensor, ends: Tensor, edge_ends: Tensor) -> Iterator[Chunk]:
    """Yield the chunks of `edges`, `[2, num_edges]` positions sorted by target."""
    local, halos, halo_ends, rows = _number(edges, ends)
    start, halo_start, edge_start = 0, 0, 0
    bounds = zip(ends.tolist(), halo_ends.tolist(), edge_ends.tolist(), strict=True)
    for index, (end, halo_end, edge_end) in enumerate(bounds):
        yield Chunk(
            index=index,
            start=start,
            end=end,
            halo=halos[halo_start:halo_end].clone(),
            halo_chunks=tuple(rows[index]),
            halo_counts=tuple(rows[index].values()),
            edge_start=edge_start,
            edge_end=edge_end,
            edge_index=torch.stack([row[edge_start:edge_end] for row in local]),
        )
        start, halo_start, edge_start = end, halo_end, edge_end


def _number(edges: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, list[dict[int, int]]]:
    """Number the nodes of each chunk: its own first, then its halo.

    Returns the edges in local numbers; the halos of all chunks, and the end of each; for each chunk
    its halo rows by source chunk, ascending.
    """
    num_chunks, num_nodes = ends.numel(), int(ends[-1])
    sizes = ends.diff(prepend=ends.new_zeros(1))
    owner = torch.repeat_interleave(torch.arange(num_chunks, device=ends.device), sizes)
    source, target = edges
    chunk_of_edge = owner[target]
    start_of_edge = (ends - sizes)[chunk_of_edge]
    local = source - start_of_edge
    outside = (owner[source] != chunk_of_edge).nonzero().flatten()
    # One sort for all chunks takes the same time for any number of chunks.
    reader = chunk_of_edge[outside]
    pairs, place = torch.unique(reader * num_nodes + source[outside], return_inverse=True)
    halos, readers = pairs % num_nodes, pairs // num_nodes
    num_halo = torch.bincount(readers, minlength=num_chunks)
    halo_ends = num_halo.cumsum(0)
    local[outside] = place + (sizes - halo_ends + num_halo)[reader]
    pairs, counts = torch.unique(readers * num_chunks + owner[halos], return_counts=True)
    rows: list[dict[int, int]] = [{} for _ in range(num_chunks)]
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        rows[pair // num_chunks][pair % num_chunks] = count
    return torch.stack([local, target - start_of_edge]), halos, halo_ends, rows
