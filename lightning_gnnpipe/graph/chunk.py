"""What a graph is cut into: chunks of nodes, each with all edges that end in it.

Nodes are put into chunk-contiguous order; a node's place in it is its *position*. A chunk numbers
its own nodes first, then its halo, the sources of its edges that lie outside:

    positions     0 1 2 3 | 4 5 6 | 7 8          chunk 1 = positions 4, 5, 6, halo = 1, 8
    chunk 1       local 0 1 2 = positions 4 5 6,  local 3 4 = positions 1 8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """What a chunk swaps with the part of it that another shard holds, whenever it is written.

    Attributes:
        shard: The other shard.
        send: `[num_sent]` rows of the chunk, counted from its first, that the other one reads.
        receive: `[num_received]` rows in which those of the other one are kept.
    """

    shard: int
    send: Tensor
    receive: Tensor

    def to(self, device: torch.device | str) -> Peer:
        """Return the peer with its tensors on `device`."""
        return Peer(self.shard, self.send.to(device), self.receive.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A block of nodes with all edges that end in it.

    Attributes:
        index: Its number, from 0.
        start: First position.
        end: Position after the last.
        halo: `[num_halo]` positions of the sources outside, ascending.
        halo_chunks: The chunks that the halo lies in, ascending.
        halo_counts: Halo rows in each of `halo_chunks`.
        edge_start: First slot of its edges in the plan's order.
        edge_end: Slot after the last.
        edge_index: `[2, num_edges]` local numbers of sources and targets; targets are below
            `num_nodes`.
        peers: The other shards, in a graph that is split over several.
        is_whole: Whether it is all there is: the only chunk of its plan.
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

    @property
    def num_nodes(self) -> int:
        """Nodes of the chunk."""
        return self.end - self.start

    @property
    def num_halo(self) -> int:
        """Nodes outside that the chunk reads."""
        return self.halo.numel()

    @property
    def num_edges(self) -> int:
        """Edges that end in the chunk."""
        return self.edge_end - self.edge_start

    def with_edges(self, keep: Tensor) -> Chunk:
        """Return the chunk with some of its edges, with the same halo.

        Args:
            keep: `[num_edges_of_graph]` for each slot whether its edge is kept; the kept ones are
                numbered anew.
        """
        own = keep[self.edge_start : self.edge_end]
        start, count = int(keep[: self.edge_start].sum()), int(own.sum())
        edge_index = self.edge_index[:, own]
        return replace(self, edge_start=start, edge_end=start + count, edge_index=edge_index)

    def to(self, device: torch.device | str) -> Chunk:
        """Return the chunk with its tensors on `device`."""
        peers = tuple(peer.to(device) for peer in self.peers)
        halo, edge_index = self.halo.to(device), self.edge_index.to(device)
        return replace(self, halo=halo, edge_index=edge_index, peers=peers)


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
