"""A graph split over the ranks of a stage: each holds the rows of its shard, and their edges.

Every chunk is split over all shards, so that they share the work on it; a *piece* is the part of a
chunk in a shard. Positions run through the pieces, shard by shard. A shard reads rows of others,
its *ghosts*, behind its own:

    rows    0 .. num_own - 1            its own nodes, chunk by chunk
            num_own .. num_rows - 1     ghosts, by the shard and the chunk that they lie in

A shard's plan looks like that of a smaller graph, whose chunks have part of their halo in ghosts.
Whenever a chunk's rows are written, those that are ghosts elsewhere travel there; see `Peer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gnnpipe.graph.chunk import Chunk, Peer, cut_edges

if TYPE_CHECKING:
    from lightning_gnnpipe.graph.plan import ChunkPlan


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What a shard's plan is cut from.

    Attributes:
        index: This shard.
        num_shards: Shards, G.
        num_chunks: Chunks, K.
        globe: The plan of all pieces: piece `c` of shard `g` is its chunk `g * num_chunks + c`.
        ghosts: `[num_ghosts]` their positions in `globe`, ascending, read along edges or against.
    """

    index: int
    num_shards: int
    num_chunks: int
    globe: ChunkPlan
    ghosts: Tensor

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return a shard's first position in `globe`, and that behind its last."""
        pieces = self.globe.chunks[shard * self.num_chunks : (shard + 1) * self.num_chunks]
        return pieces[0].start, pieces[-1].end

    def nodes(self, shard: int) -> Tensor:
        """Return the nodes of a shard, in the order of its rows."""
        first, end = self.bounds(shard)
        return self.globe.perm[first:end]

    @property
    def row_nodes(self) -> Tensor:
        """`[num_rows]` the node in each row, own and ghosts."""
        return torch.cat([self.nodes(self.index), self.globe.perm[self.ghosts]])

    @property
    def num_rows(self) -> int:
        """Rows of this shard, ghosts included."""
        first, end = self.bounds(self.index)
        return end - first + self.ghosts.numel()

    def localize(self, edges: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the edges that end in this shard, between its rows, and their values.

        Args:
            edges: `[2, num_edges]` positions in `globe`, sorted by target.
            values: `[num_edges, *]`, or None.
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
        """Return `[num_rows]` the chunk that each row lies in."""
        first, end = self.bounds(self.index)
        own = torch.arange(first, end, device=self.ghosts.device)
        return self.globe.chunk_of_position()[torch.cat([own, self.ghosts])] % self.num_chunks

    def to(self, device: torch.device | str) -> Shard:
        """Return the shard with its tensors on `device`."""
        return replace(self, globe=self.globe.to(device), ghosts=self.ghosts.to(device))


def make_shard(globe: ChunkPlan, index: int, num_shards: int) -> Shard:
    """Return shard `index` of the plan of all pieces."""
    num_chunks = globe.num_chunks // num_shards
    shard = Shard(index, num_shards, num_chunks, globe, globe.perm.new_empty(0))
    first, end = shard.bounds(index)
    source, target = globe.whole.chunks[0].edge_index
    read = torch.cat([source[_within(target, first, end)], target[_within(source, first, end)]])
    return replace(shard, ghosts=torch.unique(read[~_within(read, first, end)]))


def cut_shard(shard: Shard) -> tuple[tuple[Chunk, ...], Chunk]:
    """Return the chunks of a shard's plan, and the one chunk that has all its nodes."""
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
    limits = torch.tensor([num_own, shard.num_rows], device=device)
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
    """Return for each chunk what it swaps with each other shard, in the direction of `globe`."""
    globe, num_nodes = shard.globe, shard.globe.num_nodes
    source, target = globe.whole.chunks[0].edge_index
    ends = torch.tensor(
        [shard.bounds(one)[1] for one in range(shard.num_shards)], device=source.device
    )
    reader, owner = (torch.searchsorted(ends, nodes, right=True) for nodes in (target, source))
    is_cross = reader != owner
    pairs = torch.unique(reader[is_cross] * num_nodes + source[is_cross])
    reader, read = pairs // num_nodes, pairs % num_nodes
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
    """Return what all chunks swap together, counted from the first row."""
    merged = []
    for others in zip(*peers, strict=True):
        sends = [peer.send + chunk.start for peer, chunk in zip(others, chunks, strict=True)]
        receives = [peer.receive for peer in others]
        merged.append(Peer(others[0].shard, torch.cat(sends), torch.cat(receives)))
    return tuple(merged)


def _within(positions: Tensor, first: int, end: int) -> Tensor:
    return (positions >= first) & (positions < end)
