"""Histories with graph parallelism: ranks exchange rows when they write them.

    push       own rows -> history; boundary rows -> ghosts on other ranks, theirs -> our ghosts
    read       own rows and ghosts, as on one rank
    add_grad   gradients of ghosts -> their owners, which add them to their own

A ghost is a local copy of another shard's row. Ghosts in the same chunk are fresh, so their
gradients are not scaled, unlike gradients between chunks.

Source: graph parallelism within a stage, as in the hybrid of GNNPipe (arXiv 2308.10087).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.codecs import Codecs, get_codecs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.staleness import HistoryStore, MomentStore
from lightning_gnnpipe.types import TrafficKind

_Slot = tuple[TrafficKind, Hashable, int]  # message kind, call, chunk


class SharedStore(HistoryStore):
    """The histories of one shard; `more`: further arguments of `HistoryStore`.

    Without `keeps_rows` it has no histories, and every chunk must be the whole shard.
    """

    def __init__(
        self, plan: ChunkPlan, transport: Transport, *more: Any, keeps_rows: bool = True
    ) -> None:
        super().__init__(plan.num_rows, plan.num_chunks, *more)
        self.moments = MomentStore(plan.num_chunks, partial(_sum, transport), keeps=keeps_rows)
        self._plan, self._transport, self._keeps_rows = plan, transport, keeps_rows
        self._table: tuple[Hashable, Tensor] | None = None
        self._codecs, self._keeps_last, self._is_async = get_codecs("fp32"), False, False
        self._flying: dict[_Slot, Callable[[], list[Tensor]]] = {}  # waits for a message
        self._last: dict[_Slot, list[Tensor]] = {}  # received in the previous step
        self._like: dict[Hashable, Tensor] = {}  # empty, with the rows' dtype and channels
        self._near: dict[Hashable, tuple[Tensor, Tensor]] = {}  # gradients of ghosts in the chunk
        self._ghosts: dict[Chunk, Tensor] = {}
        self._is_near: dict[Chunk, Tensor] = {}

    def begin_pass(self, codecs: Codecs, *, is_async: bool, is_synchronous: bool) -> None:
        """Set how a pass sends; `is_synchronous` makes it wait for other shards."""
        self._codecs, self._keeps_last = codecs, is_async
        self._is_async = is_async and not is_synchronous
        # Asynchronous steps must not wait. Sums of a layer's drift count as control traffic.
        self.sum_over_shards = (
            None if self._is_async else partial(_sum, self._transport, kind="control")
        )
        if not self._is_async:
            self.drain()

    @property
    def sizes(self) -> list[int]:
        """Nodes of each chunk; of all shards, unless messages are asynchronous."""
        shard = self._plan.shard
        if self._is_async or shard is None:
            return super().sizes
        starts, num_chunks = range(0, len(shard.globe.chunks), self.num_chunks), self.num_chunks
        return [
            sum(shard.globe.chunks[start + chunk].num_nodes for start in starts)
            for chunk in range(num_chunks)
        ]

    def settle(self) -> None:
        """Wait for messages between shards, and keep them for the next step on this input."""
        self._last |= {slot: wait() for slot, wait in self._flying.items()}
        self._flying.clear()

    def drain(self) -> None:
        """Wait for messages between shards, and discard them."""
        self.settle()
        self._last.clear()

    def push(self, key: Hashable, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        """Write the chunk's rows here, and send them to ranks where they are ghosts."""
        rows = rows.detach()
        self._like[key] = rows[:0]
        if self._keeps_rows:
            super().push(key, chunk, rows, keeps_old=keeps_old)
        sends = [(peer.shard, rows[peer.send]) for peer in chunk.peers]
        shape = rows.shape[1:]
        got = [(peer.shard, rows.new_empty((peer.receive.numel(), *shape))) for peer in chunk.peers]
        received = self._swap(("halo", key, _number(chunk)), sends, got)
        if self._keeps_table(chunk):
            table = rows.new_zeros((self._plan.num_rows, *shape))  # unused ghosts stay 0
            table[: rows.size(0)] = rows
            for peer, part in zip(chunk.peers, received, strict=True):
                table[peer.receive] = part
            self._table = key, table
        if not self._keeps_rows:
            return
        for i, peer in enumerate(chunk.peers):
            # In the first asynchronous step nothing has arrived: ghosts keep their rows.
            part = received[i] if received else self.rows(key)[peer.receive]
            self.push_ghosts(key, peer.receive, part, keeps_old=keeps_old)

    def _keeps_table(self, chunk: Chunk) -> bool:
        """Whether reads use an unrounded table of this call, not the history."""
        is_rounded = chunk.is_whole and self.options.dtype is not None
        return not self._keeps_rows or (is_rounded and not self._is_async)

    def read(self, key: Hashable, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Return all rows, own and ghosts, `[num_rows, *]`, and their drift."""
        if self._keeps_table(chunk) and self._table is not None and self._table[0] == key:
            return self._table[1], None
        return super().read(key, chunk)

    def push_grad(self, key: Hashable, chunk: Chunk, grad: Tensor) -> None:
        near = self._near_halo(chunk)
        self._near[key] = chunk.halo[near], grad[near]
        if not chunk.is_whole:
            super().push_grad(key, chunk, grad.masked_fill(_like(near, grad), 0.0))

    def add_grad(self, key: Hashable, chunk: Chunk, own: Tensor, *, is_linear: bool) -> Tensor:
        """Return the gradient of the chunk's rows from all chunks and ranks."""
        ghosts, like = self.ghosts(chunk), self._like[key]
        own = super().add_grad(key, chunk, own, is_linear=is_linear)
        owed = None if chunk.is_whole else self.grads(key).take(ghosts)
        if owed is not None:
            owed = owed.to(like.dtype) * (self.linear_scale if is_linear else self.message_scale)
        else:
            owed = like.new_zeros((ghosts.numel(), *like.shape[1:]))
        if key in self._near:
            positions, grad = self._near.pop(key)
            owed.index_add_(0, torch.searchsorted(ghosts, positions), grad.to(owed.dtype))
        received = self.give_back(key, chunk, owed)
        return own + received.to(own.dtype)

    def ghosts(self, chunk: Chunk) -> Tensor:
        """Return the chunk's ghost rows, `[num_ghosts]`, ascending."""
        if chunk not in self._ghosts:
            none = chunk.halo.new_empty(0)
            self._ghosts[chunk] = torch.cat([none, *(peer.receive for peer in chunk.peers)])
        return self._ghosts[chunk]

    def give_back(self, key: Hashable, chunk: Chunk, grad: Tensor) -> Tensor:
        """Send the gradient of ghosts, `[num_ghosts, *]`, to owners; return own rows' gradient."""
        counts = [peer.receive.numel() for peer in chunk.peers]
        shape = grad.shape[1:]
        parts = torch.split(grad.detach(), counts)
        sends = [(peer.shard, part) for peer, part in zip(chunk.peers, parts, strict=True)]
        got = [(peer.shard, grad.new_empty((peer.send.numel(), *shape))) for peer in chunk.peers]
        total = grad.new_zeros((chunk.num_nodes, *shape))
        received = self._swap(("halo_grad", key, _number(chunk)), sends, got)
        for peer, part in zip(chunk.peers, received, strict=False):
            total.index_add_(0, peer.send, part)
        return total

    @property
    def shards(self) -> SharedStore:
        return self

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all ranks of the stage; collective."""
        return _sum(self._transport, tensor)

    def _near_halo(self, chunk: Chunk) -> Tensor:
        """Return a mask, `[num_halo]`, of halo rows that lie in the chunk itself."""
        if chunk not in self._is_near:
            self._is_near[chunk] = torch.isin(chunk.halo, self.ghosts(chunk))
        return self._is_near[chunk]

    def _swap(
        self,
        slot: _Slot,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> list[Tensor]:
        """Exchange tensors with other shards; asynchronously, return the previous step's."""
        mesh = self._transport.mesh
        before = self._flying.pop(slot, None)
        arrived = None if before is None else before()
        wait = self._transport.exchange(
            slot[0],
            [(mesh.rank_of(mesh.stage, shard), tensor) for shard, tensor in sends],
            [(mesh.rank_of(mesh.stage, shard), tensor) for shard, tensor in receives],
            self._codecs.of(slot[0]),
        )
        old, is_grad = self._last.get(slot, []), slot[0] == "halo_grad"
        is_first = arrived is None and not old  # a gradient without a previous one
        if not self._is_async or (is_grad and is_first):
            arrived = wait()
        else:
            self._flying[slot] = wait
        if arrived is None:
            return old
        if self._keeps_last and is_grad:  # rows are in the history
            self._last[slot] = arrived
        return arrived


def _sum(transport: Transport, tensor: Tensor, kind: TrafficKind = "halo") -> Tensor:
    total = tensor.detach().clone()
    transport.sum_over_shards(total, kind)
    return total


def _number(chunk: Chunk) -> int:
    return -1 if chunk.is_whole else chunk.index


def _like(mask: Tensor, rows: Tensor) -> Tensor:
    """Reshape `mask`, `[num_rows]`, to broadcast over `rows`, `[num_rows, *]`."""
    return mask.view(-1, *(1 for _ in rows.shape[1:]))
