"""Plans: a graph cut into chunks, a mini-batch of graphs cut into micro-batches."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnnpipe.graph.chunk import (
    Chunk,
    Shard,
    cut_chunk,
    cut_edges,
    cut_shard,
    make_shard,
    moved,
)
from lightning_gnnpipe.graph.partition import check_assignment

_BLOCK = 1 << 22  # edges that are looked at together
_HELD = 1 << 24  # edges whose numbers are held together


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """A graph cut into chunks: nodes in chunk-contiguous order, edges in the chunk of their target.

    Attributes:
        num_edges: Edges, E, without dropped ones.
        perm: `[num_nodes]` the node at each position.
        slots: See `edge_perm`; None if the user's edges have the plan's order.
        edge_sizes: Edges in each of several consecutive edge sets; empty for one set.
        shard: The part of a larger graph that this plan covers; None for the whole graph.
    """

    num_nodes: int
    num_edges: int
    perm: Tensor
    slots: Tensor | None
    chunks: tuple[Chunk, ...]
    _whole: Chunk = field(repr=False)
    edge_sizes: tuple[int, ...] = ()
    shard: Shard | None = None

    @cached_property
    def edge_perm(self) -> Tensor:
        """`[num_edges]` the user's edge in each slot, sorted by the position of its target."""
        if self.slots is not None:
            return self.slots
        with torch.inference_mode(False):
            return torch.arange(self.num_edges, device=self.perm.device)

    @property
    def is_in_order(self) -> bool:
        """Whether the user's nodes and edges have the plan's order."""
        return self.slots is None

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def globe(self) -> ChunkPlan:
        """The plan of the whole graph; this plan itself without shards."""
        return self if self.shard is None else self.shard.globe

    @property
    def num_rows(self) -> int:
        """Rows of a history: nodes, then ghosts of other shards."""
        return self.num_nodes + (0 if self.shard is None else self.shard.ghosts.numel())

    @property
    def row_nodes(self) -> Tensor:
        """`[num_rows]` the node of each row."""
        if self.shard is None:
            return self.perm
        return torch.cat([self.perm, self.globe.perm[self.shard.ghosts]])

    @property
    def whole(self) -> ChunkPlan:
        """The plan with one chunk over the same positions."""
        return self if self.num_chunks == 1 else self._in_one  # uncached: no plan holds itself

    @cached_property
    def _in_one(self) -> ChunkPlan:
        return replace(self, chunks=(self._whole,))

    @cached_property
    def reverse(self) -> ChunkPlan:
        """The plan of the same chunks with reversed edges: each has the edges that start in it."""
        with torch.inference_mode(False):  # training uses the cached plan too
            if self.shard is not None:
                turned = plan_of_shard(replace(self.shard, globe=self.globe.reverse))
            else:
                source, target = self._whole.edge_index
                ends = torch.tensor([chunk.end for chunk in self.chunks], device=source.device)
                turned = _assemble(self.perm, target, source, self.edge_perm, ends)
            return turned.with_edge_sets(self.edge_sizes)

    @property
    def num_edge_sets(self) -> int:
        return max(len(self.edge_sizes), 1)

    def with_edge_sets(self, sizes: Sequence[int]) -> ChunkPlan:
        """Return the plan with edges in consecutive sets of these sizes."""
        shard = self.shard
        if shard is not None:
            shard = replace(shard, globe=shard.globe.with_edge_sets(sizes))
        edge_sizes = tuple(sizes) if len(sizes) > 1 else ()
        return replace(self, edge_sizes=edge_sizes, shard=shard)

    def edge_set(self, number: int) -> ChunkPlan:
        """Return the plan of one edge set: same chunks and halos, slots numbered in the set."""
        return self._edge_sets[number] if self.edge_sizes else self

    @cached_property
    def _edge_sets(self) -> tuple[ChunkPlan, ...]:
        with torch.inference_mode(False):
            return tuple(self._take_edges(number) for number in range(len(self.edge_sizes)))

    def _take_edges(self, number: int) -> ChunkPlan:
        edge = self.edge_perm - sum(self.edge_sizes[:number])
        keep = (edge >= 0) & (edge < self.edge_sizes[number])
        shard = self.shard
        if shard is not None:
            shard = replace(shard, globe=shard.globe.edge_set(number))
        return replace(
            self,
            num_edges=int(keep.sum()),
            shard=shard,
            slots=edge[keep],
            chunks=tuple(chunk.with_edges(keep) for chunk in self.chunks),
            _whole=self._whole.with_edges(keep),
            edge_sizes=(),
        )

    @property
    def is_disjoint(self) -> bool:
        """Whether no edge joins two chunks and the plan is not a shard."""
        return self.shard is None and not any(chunk.num_halo for chunk in self.chunks)

    def chunk_of_row(self) -> Tensor:
        """Return `[num_rows]` the chunk of each row."""
        return self.chunk_of_position() if self.shard is None else self.shard.chunk_of_row()

    def localize(self, edges: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the whole graph's edges that end here, and values; see `Shard.localize`."""
        return (edges, values) if self.shard is None else self.shard.localize(edges, values)

    def chunk_of_position(self) -> Tensor:
        """Return `[num_nodes]` the chunk of each position."""
        sizes = [chunk.num_nodes for chunk in self.chunks]
        owners = torch.repeat_interleave(torch.arange(self.num_chunks), torch.tensor(sizes))
        return owners.to(self.perm.device)

    def to(self, device: torch.device | str) -> ChunkPlan:
        return moved(self, device)


def shard_plan(
    edge_index: Tensor,
    assignment: Tensor,
    shards: Tensor,
    *,
    index: int,
    num_shards: int,
) -> ChunkPlan:
    """Return the plan of shard `index`; no shard may be empty."""
    num_chunks = int(assignment.max()) + 1
    pieces = shards * num_chunks + assignment
    globe = _in_chunks(edge_index, pieces, num_chunks * num_shards)
    return plan_of_shard(make_shard(globe, index, num_shards))


def plan_from_assignment(edge_index: Tensor, num_nodes: int, assignment: Tensor) -> ChunkPlan:
    """Return the plan with node `n` in chunk `assignment[n]`, multi-edges and loops included."""
    num_chunks = int(assignment.max()) + 1 if num_nodes else 0
    check_assignment(assignment, num_nodes, num_chunks)
    return _in_chunks(edge_index, assignment, num_chunks)


def _in_chunks(edge_index: Tensor, assignment: Tensor, num_chunks: int) -> ChunkPlan:
    perm, position, ends = _in_order(assignment.to(edge_index.device).long(), num_chunks)
    source, target = position[edge_index[0].long()], position[edge_index[1].long()]
    number = torch.arange(source.numel(), device=perm.device)
    return _assemble(perm, source, target, number, ends)


def _in_order(assignment: Tensor, num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the node at each position, the position of each node, and the end of each chunk."""
    perm = assignment.argsort(stable=True)
    position = torch.empty_like(perm)
    position[perm] = torch.arange(perm.numel(), device=perm.device)
    return perm, position, torch.bincount(assignment, minlength=num_chunks).cumsum(0)


class CutChunk(NamedTuple):
    """A chunk; its edges, `[2, num_edges]` positions; the user's edge in each of its slots."""

    chunk: Chunk
    edges: Tensor
    slots: Tensor


def cut_in_turn(edge_index: Tensor, assignment: Tensor) -> tuple[Tensor, Iterator[CutChunk]]:
    """Return `[num_nodes]` the node at each position, and the chunks of `plan_from_assignment`.

    Edges are read block by block. Held at a time: the edges of one chunk, and the numbers of those
    that end in the next few chunks, about `_HELD`.
    """
    num_chunks = int(assignment.max()) + 1
    perm, position, ends = _in_order(assignment, num_chunks)
    owners = assignment.to(torch.int16 if num_chunks < 1 << 15 else torch.int32)
    blocks = torch.split(edge_index[1], _BLOCK)
    counts = (torch.bincount(owners[one.long()], minlength=num_chunks) for one in blocks)
    passed = sum(counts, torch.zeros(num_chunks, dtype=torch.int64)).cumsum(0) // _HELD

    def find(group: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the chunks of a group that is read at once, and the edges that end in each."""
        first, end = torch.searchsorted(passed, torch.tensor([group, group + 1])).tolist()
        places, found = list[Tensor](), list[Tensor]()
        for number, block in enumerate(blocks):
            owner = owners[block.long()]
            places.append(((owner >= first) & (owner < end)).nonzero().flatten())
            found.append(owner[places[-1]])
            places[-1] += number * _BLOCK
        slots, owner = torch.cat(places), torch.cat(found)
        del places, found  # hold as much again
        yield from ((index, slots[owner == index]) for index in range(first, end))

    def cut() -> Iterator[CutChunk]:
        edge_start = 0
        for group in torch.unique(passed).tolist():
            for index, slots in find(group):
                source, target = (position[side[slots].long()] for side in edge_index)
                target, order = target.sort(stable=True)
                edges = torch.stack([source[order], target])
                yield CutChunk(cut_chunk(edges, ends, index, edge_start), edges, slots[order])
                edge_start += slots.numel()

    return perm, cut()


def plan_of_shard(shard: Shard) -> ChunkPlan:
    """Return the plan of a shard's nodes, ghosts and edges."""
    first, end = shard.bounds(shard.index)
    pieces = shard.globe.chunks[shard.index * shard.num_chunks :][: shard.num_chunks]
    edges = shard.globe.edge_perm[pieces[0].edge_start : pieces[-1].edge_end]
    chunks, whole = cut_shard(shard)
    perm = shard.globe.perm[first:end]
    return ChunkPlan(end - first, edges.numel(), perm, edges, chunks, whole, shard=shard)


def _assemble(
    perm: Tensor, source: Tensor, target: Tensor, edge_of_slot: Tensor, ends: Tensor
) -> ChunkPlan:
    """Return the plan of edges between positions; `ends` holds the end position of each chunk."""
    target, order = target.sort(stable=True)
    edges = torch.stack([source[order], target])
    num_nodes, num_edges = perm.numel(), edges.size(1)
    none = perm.new_empty(0)
    whole = Chunk(0, 0, num_nodes, none, (), (), 0, num_edges, edges, is_whole=True)
    chunks: tuple[Chunk, ...] = (whole,)
    if ends.numel() != 1:
        chunks = tuple(cut_edges(edges, ends, torch.searchsorted(target, ends)))
    return ChunkPlan(num_nodes, num_edges, perm, edge_of_slot[order], chunks, whole)


def chunk_order(num_chunks: int, *, epoch: int, seed: int) -> tuple[int, ...]:
    """Return the chunks in the order of the forward phase of training step `epoch`.

    Each step draws an order, the same on every rank and in every run.
    Source: GNNPipe (arXiv 2308.10087), technique 1.
    """
    chunks = list(range(num_chunks))
    Random(f"chunk order {seed} {epoch}").shuffle(chunks)
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Graphs `start` to `end - 1` of `BatchPlan.order`; their time is proportional to `work`."""

    index: int
    start: int
    end: int
    work: int
    is_whole: bool

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A mini-batch cut into micro-batches; `order` lists graphs, micro-batch by micro-batch."""

    order: tuple[int, ...]  # ascending in each micro-batch
    chunks: tuple[MicroBatch, ...]
    shard: None = None  # each stage has all micro-batches

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)


def plan_micro_batches(
    work: Sequence[int], sizes: Sequence[int], num_chunks: int, least: int = 1
) -> BatchPlan:
    """Assign graphs to `num_chunks` micro-batches, or fewer: each has `least` graphs with nodes.

    Largest first, to the micro-batch with the least work: at most a third longer than the optimum.
    Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).

    A graph without nodes goes with the next graph that has nodes, at the end with the last. Models
    that count graphs by the batch vector then find the right number in each micro-batch.

        graphs           0   1   2   3   4        micro-batch 0: graph 0
        nodes            9   4   0   6   0        micro-batch 1: graphs 1, 2, 3, 4
        micro-batch      0   1   1   1   1        graphs 2 and 4 go with graph 3
    """
    filled = [graph for graph, size in enumerate(sizes) if size]
    num_chunks = max(1, min(num_chunks, len(filled) // least))
    owner = [0] * len(sizes)
    loads = [(0, index) for index in range(num_chunks)]
    for graph in sorted(filled, key=lambda graph: -work[graph]):
        load, index = loads[0]
        heapq.heapreplace(loads, (load + max(work[graph], 1), index))
        owner[graph] = index
    held = Counter(owner[graph] for graph in filled)
    for index in range(num_chunks):
        while held[index] < least <= len(filled):  # it takes the smallest of the most
            most = max(held, key=held.__getitem__)
            graph = min((one for one in filled if owner[one] == most), key=work.__getitem__)
            owner[graph] = index
            held[index] += 1
            held[most] -= 1
    totals = Counter[int]()
    for graph in filled:
        totals[owner[graph]] += max(work[graph], 1)
    following = owner[filled[-1]] if filled else 0
    for graph in reversed(range(len(sizes))):
        following = owner[graph] = owner[graph] if sizes[graph] else following
    chunks, start, counts = [], 0, Counter(owner)
    for index in range(num_chunks):
        end = start + counts[index]
        chunks.append(MicroBatch(index, start, end, totals[index], num_chunks == 1))
        start = end
    return BatchPlan(tuple(sorted(range(len(sizes)), key=owner.__getitem__)), tuple(chunks))
