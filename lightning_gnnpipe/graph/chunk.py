"""What a graph is cut into: chunks of nodes, each with all edges that end in it.

Nodes are put into chunk-contiguous order; a node's place in it is its *position*. A chunk numbers
its own nodes first, then its halo, the sources of its edges that lie outside:

    positions     0 1 2 3 | 4 5 6 | 7 8          chunk 1 = positions 4, 5, 6, halo = 1, 8
    chunk 1       local 0 1 2 = positions 4 5 6,  local 3 4 = positions 1 8
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


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

    def to(self, device: torch.device | str) -> Chunk:
        """Return the chunk with its tensors on `device`."""
        return replace(self, halo=self.halo.to(device), edge_index=self.edge_index.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """A graph cut into chunks.

    Attributes:
        num_nodes: Nodes, N.
        num_edges: Edges, E.
        perm: `[num_nodes]` the node at each position.
        edge_perm: `[num_edges]` the edge in each slot, sorted by the position of its target.
        chunks: The chunks.
        whole: The same graph, in the same order, as a plan of one chunk.
    """

    num_nodes: int
    num_edges: int
    perm: Tensor
    edge_perm: Tensor
    chunks: tuple[Chunk, ...]
    _whole: Chunk = field(repr=False)
    _cache: dict[str, ChunkPlan] = field(default_factory=dict, repr=False)

    @property
    def num_chunks(self) -> int:
        """Chunks, K."""
        return len(self.chunks)

    @property
    def whole(self) -> ChunkPlan:
        """The plan of one chunk over the same positions."""
        if self.num_chunks == 1:
            return self
        if "whole" not in self._cache:
            self._cache["whole"] = replace(self, chunks=(self._whole,), _cache={})
        return self._cache["whole"]

    @property
    def sources(self) -> dict[int, tuple[int, ...]]:
        """For each chunk the other chunks that it reads."""
        return {chunk.index: chunk.halo_chunks for chunk in self.chunks}

    @property
    def halo_counts(self) -> dict[int, dict[int, int]]:
        """For each chunk the halo rows in each of the other chunks that it reads."""
        return {c.index: dict(zip(c.halo_chunks, c.halo_counts, strict=True)) for c in self.chunks}

    def chunk_of_position(self) -> Tensor:
        """Return `[num_nodes]` the chunk that each position lies in."""
        sizes = [chunk.num_nodes for chunk in self.chunks]
        owners = torch.repeat_interleave(torch.arange(self.num_chunks), torch.tensor(sizes))
        return owners.to(self.perm.device)

    def to(self, device: torch.device | str) -> ChunkPlan:
        """Return the plan with its tensors on `device`."""
        return replace(
            self,
            perm=self.perm.to(device),
            edge_perm=self.edge_perm.to(device),
            chunks=tuple(chunk.to(device) for chunk in self.chunks),
            _whole=self._whole.to(device),
            _cache={},
        )
