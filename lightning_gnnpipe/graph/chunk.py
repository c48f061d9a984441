"""Chunks: blocks of nodes, each with all edges that end in it.

A node's *position* is its place in chunk-contiguous order. A chunk numbers its own nodes first,
then its halo, the sources of its edges that lie outside:

    positions     0 1 2 3 | 4 5 6 | 7 8          chunk 1 = positions 4, 5, 6, halo = 1, 8
    chunk 1       local 0 1 2 = positions 4 5 6,  local 3 4 = positions 1 8

A graph split over the ranks of a stage has *shards*, each with a *piece* of every chunk. Positions
run through the pieces, shard by shard. A shard keeps copies of the rows that it reads from other
shards, its *ghosts*, behind its own rows:

    rows    0 .. num_own - 1            its own nodes, chunk by chunk
            num_own .. num_rows - 1     ghosts, by the shard and the chunk that they lie in

A shard's plan looks like the plan of a smaller graph, in which part of the halos are ghosts.
Whenever a chunk is written, its rows are sent to the shards that keep them as ghosts; see `Peer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_gnnpipe.graph.partition import remote_reads

if TYPE_CHECKING:
    from lightning_gnnpipe.graph.plan import ChunkPlan


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

    @property
    def work(self) -> int:
        """Nodes and edges, which its time is proportional to."""
        return self.num_nodes + self.num_edges

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
    edge_start = 0
    for index, edge_end in enumerate(edge_ends.tolist()):
        yield cut_chunk(edges[:, edge_start:edge_end], ends, index, edge_start)
        edge_start = edge_end


def cut_chunk(edges: Tensor, ends: Tensor, index: int, edge_start: int) -> Chunk:
    """Return chunk `index` with all its `edges`; `ends`: the end position of each chunk."""
    (source, target), end = edges, int(ends[index])
    start = int(ends[index - 1]) if index else 0
    is_outside = (source < start) | (source >= end)
    halo, place = torch.unique(source[is_outside], return_inverse=True)
    local = torch.stack([source, target]).sub_(start)
    local[0, is_outside] = place + (end - start)
    owners = torch.searchsorted(ends, halo, right=True)
    chunks, counts = torch.unique_consecutive(owners, return_counts=True)
    return Chunk(
        index=index,
        start=start,
        end=end,
        halo=halo,
        halo_chunks=tuple(chunks.tolist()),
        halo_counts=tuple(counts.tolist()),
        edge_start=edge_start,
        edge_end=edge_start + edges.size(1),
        edge_index=local,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Shard `index` of `num_shards`, before its plan is cut into `num_chunks` chunks.

    Attributes:
        globe: The plan of all pieces: piece `c` of shard `g` is its chunk `g * num_chunks + c`.
        ghosts: `[num_ghosts]` their positions in `globe`, ascending, read along edges or against.
    """

    index: int
    num_shards: int
    num_chunks: int
    globe: ChunkPlan
    ghosts: Tensor

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return a shard's first position in `globe`, and the position after its last."""
        pieces = self.globe.chunks[shard * self.num_chunks : (shard + 1) * self.num_chunks]
        return pieces[0].start, pieces[-1].end

    def nodes(self, shard: int) -> Tensor:
        """Return the nodes of a shard, in the order of its rows."""
        first, end = self.bounds(shard)
        return self.globe.perm[first:end]

    def localize(self, edges: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the edges that end in this shard, as pairs of its rows, and their values.

        `edges`: `[2, num_edges]` positions in `globe` sorted by target. `values`: `[num_edges, *]`.
        """
        first, end = self.bounds(self.index)
        limits = torch.tensor([first, end], device=edges.device)
        start, stop = torch.searchsorted(edges[1].contiguous(), limits).tolist()
        source, target = edges[:, start:stop]
        is_own = (source >= first) & (source < end)
        ghost = torch.searchsorted(self.ghosts, source) + (end - first)
        local = torch.stack([torch.where(is_own, source - first, ghost), target - first])
        return local, None if values is None else values[start:stop]

    def chunk_of_row(self) -> Tensor:
        """Return `[num_rows]` the chunk of each row."""
        first, end = self.bounds(self.index)
        own = torch.arange(first, end, device=self.ghosts.device)
        return self.globe.chunk_of_position()[torch.cat([own, self.ghosts])] % self.num_chunks


def make_shard(globe: ChunkPlan, index: int, num_shards: int) -> Shard:
    """Return shard `index` of the plan of all pieces."""
    num_chunks = globe.num_chunks // num_shards
    shard = Shard(index, num_shards, num_chunks, globe, globe.perm.new_empty(0))
    first, end = shard.bounds(index)
    source, target = globe.whole.chunks[0].edge_index
    read = torch.cat([source[_within(target, first, end)], target[_within(source, first, end)]])
    return replace(shard, ghosts=torch.unique(read[~_within(read, first, end)]))


def cut_shard(shard: Shard) -> tuple[tuple[Chunk, ...], Chunk]:
    """Return the chunks of a shard's plan, and one chunk of all its nodes."""
    globe, num_chunks = shard.globe, shard.num_chunks
    first, end = shard.bounds(shard.index)
    edges, _ = shard.localize(globe.whole.chunks[0].edge_index, None)
    device = edges.device
    piece_ends = torch.tensor([piece.end for piece in globe.chunks], device=device)
    own = range(shard.index * num_chunks, (shard.index + 1) * num_chunks)
    foreign = [piece for piece in range(globe.num_chunks) if piece not in own]
    ghost_ends = torch.searchsorted(shard.ghosts, piece_ends)[foreign] + (end - first)
    own_ends = piece_ends[list(own)] - first
    ends = torch.cat([own_ends, ghost_ends])
    edge_ends = torch.searchsorted(edges[1].contiguous(), ends)
    blocks = [*range(num_chunks), *(piece % num_chunks for piece in foreign)]
    peers = _find_peers(shard)
    chunks = []
    for chunk, _ in zip(cut_edges(edges, ends, edge_ends), own, strict=False):
        sources = tuple(blocks[block] for block in chunk.halo_chunks)
        chunks.append(replace(chunk, halo_chunks=sources, peers=peers[chunk.index]))
    num_own, num_edges = end - first, edges.size(1)
    limits = torch.tensor([num_own, num_own + shard.ghosts.numel()], device=device)
    whole = next(iter(cut_edges(edges, limits, limits.new_full((2,), num_edges))))
    has_halo = whole.num_halo > 0
    whole = replace(
        whole,
        halo_chunks=(0,) if has_halo else (),
        halo_counts=(whole.num_halo,) if has_halo else (),
        peers=_merge(peers, chunks),
        is_whole=True,
    )
    return ((whole,) if num_chunks == 1 else tuple(chunks)), whole


def _find_peers(shard: Shard) -> list[tuple[Peer, ...]]:
    """Return for each chunk its peers, one per other shard, along the edges of `globe`."""
    globe, edges = shard.globe, shard.globe.whole.chunks[0].edge_index
    bounds = [shard.bounds(one) for one in range(shard.num_shards)]
    sizes = torch.tensor([end - first for first, end in bounds], device=edges.device)
    owner = torch.arange(shard.num_shards, device=edges.device).repeat_interleave(sizes)
    reader, read = remote_reads(edges, owner)
    first, end = shard.bounds(shard.index)
    found: list[tuple[Peer, ...]] = []
    for chunk in range(shard.num_chunks):
        own = globe.chunks[shard.index * shard.num_chunks + chunk]
        peers = []
        for other in (one for one in range(shard.num_shards) if one != shard.index):
            piece = globe.chunks[other * shard.num_chunks + chunk]
            sent = read[(reader == other) & _within(read, own.start, own.end)]
            got = read[(reader == shard.index) & _within(read, piece.start, piece.end)]
            rows = torch.searchsorted(shard.ghosts, got) + (end - first)
            peers.append(Peer(other, sent - own.start, rows))
        found.append(tuple(peers))
    return found


def _merge(peers: list[tuple[Peer, ...]], chunks: list[Chunk]) -> tuple[Peer, ...]:
    """Merge the peers of all chunks; rows are counted from the shard's first."""
    merged = []
    for same_shard in zip(*peers, strict=True):
        sends = [peer.send + chunk.start for peer, chunk in zip(same_shard, chunks, strict=True)]
        receives = [peer.receive for peer in same_shard]
        merged.append(Peer(same_shard[0].shard, torch.cat(sends), torch.cat(receives)))
    return tuple(merged)


def _within(positions: Tensor, first: int, end: int) -> Tensor:
    return (positions >= first) & (positions < end)
