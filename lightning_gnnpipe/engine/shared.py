"""Histories with graph parallelism: ranks exchange rows when they write them.

    push       own rows -> history; boundary rows -> ghosts on other ranks, theirs -> our ghosts
    pull       from own rows and ghosts, as on one rank
    pull_grad  gradients of ghosts -> their owners, which add them to their own

A ghost is a local copy of another shard's row. Ghosts in the same chunk are fresh, so their
gradients are not scaled, unlike gradients between chunks.

Source: graph parallelism within a stage, as in the hybrid of GNNPipe (arXiv 2308.10087).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from lightning_gnnpipe.codecs import MessageOptions, get_codecs
from lightning_gnnpipe.comm import Exchange, Transport
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing import CallKey
from lightning_gnnpipe.staleness import (
    HistoryStore,
    MomentStore,
    RowMoments,
    mean_and_var,
    sums_by_chunk,
)
from lightning_gnnpipe.types import TrafficKind

_Slot = tuple[TrafficKind, CallKey, int]  # message kind, call, chunk


class SharedStore:
    """A `HaloStore` over the histories of one shard.

    Without `histories` it keeps no rows, and every chunk must be the whole shard.
    """

    def __init__(
        self, plan: ChunkPlan, transport: Transport, histories: HistoryStore | None
    ) -> None:
        self._plan, self._transport, self._histories = plan, transport, histories
        self._table: tuple[CallKey, Tensor] | None = None
        self._messages, self._codecs, self._is_async = MessageOptions(), get_codecs("fp32"), False
        self._flying: dict[_Slot, Exchange] = {}
        self._last: dict[_Slot, list[Tensor]] = {}  # received in the previous step
        self._like: dict[CallKey, Tensor] = {}  # empty, with the rows' dtype and channels
        self._near: dict[CallKey, tuple[Tensor, Tensor]] = {}  # gradients of ghosts in the chunk
        self._ghosts: dict[int, tuple[Chunk, Tensor]] = {}
        self._is_near: dict[int, tuple[Chunk, Tensor]] = {}

    def begin_pass(self, messages: MessageOptions, *, is_synchronous: bool) -> None:
        """Set the message options of a pass; `is_synchronous` makes it wait for other shards."""
        self._messages, self._codecs = messages, get_codecs(messages.halo_codec)
        self._is_async = messages.is_async and not is_synchronous
        if self._histories is not None:  # async steps must not wait
            self._histories.sum_over_shards = None if self._is_async else self._sum_drift
        if not self._is_async:
            self.drain()

    def drain(self) -> None:
        """Wait for messages between shards, and discard them."""
        for exchange in self._flying.values():
            exchange.wait()
        self._flying.clear()
        self._last.clear()

    @property
    def linear_scale(self) -> float:
        return 1.0 if self._histories is None else self._histories.linear_scale

    @property
    def shards(self) -> SharedStore:
        """The exchange with other shards: this store itself."""
        return self

    @property
    def is_local(self) -> bool:
        return self._histories is None or self._histories.is_local

    @property
    def moments(self) -> SharedMoments:
        return SharedMoments(self.sum, None if self._histories is None else self._histories.moments)

    @property
    def by_chunk(self) -> SharedStore:
        """Raise UnsupportedError: shards cannot have histories with one row per chunk."""
        raise UnsupportedError(
            expected="layers that see all nodes through messages alone, for graph_parallel",
            found="a HANConv, which takes a mean over all nodes",
            remedy="Train it with graph_parallel=1.",
        )

    def push(self, key: CallKey, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        """Write the chunk's rows here, and send them to ranks where they are ghosts."""
        rows = rows.detach()
        self._like[key] = rows[:0]
        if self._histories is not None:
            self._histories.push(key, chunk, rows, keeps_old=keeps_old)
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
        if self._histories is None:
            return
        for i, peer in enumerate(chunk.peers):
            # In the first asynchronous step nothing has arrived: ghosts keep their rows.
            part = received[i] if received else self._histories.rows(key)[peer.receive]
            self._histories.push_ghosts(key, peer.receive, part, keeps_old=keeps_old)

    def _keeps_table(self, chunk: Chunk) -> bool:
        """Whether reads use an unrounded table of this call, not the history."""
        if self._histories is None:
            return True
        return chunk.is_whole and self._histories.options.dtype is not None and not self._is_async

    def read(self, key: CallKey, chunk: Chunk) -> Tensor:
        """Return all rows, own and ghosts, `[num_rows, *]`."""
        if self._keeps_table(chunk) and self._table is not None and self._table[0] == key:
            return self._table[1]
        assert self._histories is not None
        return self._histories.read(key, chunk)

    def drift(self, key: CallKey, chunk: Chunk) -> tuple[tuple[int, ...], Tensor] | None:
        return None if self._histories is None else self._histories.drift(key, chunk)

    def pull(self, key: CallKey, chunk: Chunk, out: Tensor) -> Collection[int]:
        if self._histories is not None and not self._keeps_table(chunk):
            return self._histories.pull(key, chunk, out)
        torch.index_select(self.read(key, chunk), 0, chunk.halo, out=out)
        return ()

    def pull_again(self, key: CallKey, chunk: Chunk, out: Tensor, stale: Collection[int]) -> None:
        assert self._histories is not None
        self._histories.pull_again(key, chunk, out, stale)

    def push_grad(self, key: CallKey, chunk: Chunk, grad: Tensor) -> None:
        near = self._near_halo(chunk)
        self._near[key] = chunk.halo[near], grad[near]
        if self._histories is not None and not chunk.is_whole:
            self._histories.push_grad(key, chunk, grad.masked_fill(_like(near, grad), 0.0))

    def pull_grad(self, key: CallKey, chunk: Chunk, *, is_linear: bool) -> Tensor | None:
        """Return the scaled gradient of own rows from other chunks and ranks."""
        histories, ghosts = self._histories, self.ghosts(chunk)
        own = None if histories is None else histories.pull_grad(key, chunk, is_linear=is_linear)
        owed = (
            None
            if histories is None
            else histories.ghost_grad(key, chunk, ghosts, is_linear=is_linear)
        )
        like = self._like[key]
        if owed is not None:
            owed = owed.to(like.dtype)
        else:
            owed = like.new_zeros((ghosts.numel(), *like.shape[1:]))
        if key in self._near:
            positions, grad = self._near.pop(key)
            owed.index_add_(0, torch.searchsorted(ghosts, positions), grad.to(owed.dtype))
        received = self.give_back(key, chunk, owed)
        return received if own is None else own.to(received.dtype) + received

    def keep_output(self, key: CallKey, chunk: Chunk, rows: Tensor) -> None:
        assert self._histories is not None
        self._histories.keep_output(key, chunk, rows)

    def kept_output(self, key: CallKey, chunk: Chunk) -> Tensor:
        assert self._histories is not None
        return self._histories.kept_output(key, chunk)

    def add_output_grad(
        self, key: CallKey, chunk: Chunk, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        assert self._histories is not None
        return self._histories.add_output_grad(key, chunk, grad)

    def ghosts(self, chunk: Chunk) -> Tensor:
        """Return the chunk's ghost rows, `[num_ghosts]`, ascending."""
        if id(chunk) not in self._ghosts:
            none = chunk.halo.new_empty(0)
            found = torch.cat([none, *(peer.receive for peer in chunk.peers)])
            self._ghosts[id(chunk)] = chunk, found
        return self._ghosts[id(chunk)][1]

    def give_back(self, key: CallKey, chunk: Chunk, grad: Tensor) -> Tensor:
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

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all ranks of the stage; collective."""
        total = tensor.detach().clone()
        self._transport.sum_over_shards(total, "halo")
        return total

    def _sum_drift(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of a layer's drift; counts as control traffic."""
        total = tensor.clone()
        self._transport.sum_over_shards(total, "control")
        return total

    def _near_halo(self, chunk: Chunk) -> Tensor:
        """Return a mask, `[num_halo]`, of halo rows that lie in the chunk itself."""
        if id(chunk) not in self._is_near:
            self._is_near[id(chunk)] = chunk, torch.isin(chunk.halo, self.ghosts(chunk))
        return self._is_near[id(chunk)][1]

    def _swap(
        self,
        slot: _Slot,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> list[Tensor]:
        """Exchange tensors with other shards; asynchronously, return the previous step's."""
        mesh = self._transport.mesh
        before = self._flying.pop(slot, None)
        arrived = None if before is None else before.wait()
        exchange = self._transport.exchange(
            slot[0],
            [(mesh.rank_of(mesh.stage, shard), tensor) for shard, tensor in sends],
            [(mesh.rank_of(mesh.stage, shard), tensor) for shard, tensor in receives],
            self._codecs.of(slot[0]),
        )
        if not self._is_async:
            arrived = exchange.wait()
            self._remember(slot, arrived)
            return arrived
        old = self._last.get(slot, [])
        if arrived is None and not old and slot[0] == "halo_grad":  # no previous ones
            arrived = exchange.wait()
            self._remember(slot, arrived)
            return arrived
        self._flying[slot] = exchange
        if arrived is None:
            return old
        self._remember(slot, arrived)
        return arrived

    def _remember(self, slot: _Slot, received: list[Tensor]) -> None:
        """Keep received gradients for the next async step; rows are in the history."""
        if self._messages.is_async and slot[0] == "halo_grad":
            self._last[slot] = received


def _number(chunk: Chunk) -> int:
    return -1 if chunk.is_whole else chunk.index


def _like(mask: Tensor, rows: Tensor) -> Tensor:
    """Reshape `mask`, `[num_rows]`, to broadcast over `rows`, `[num_rows, *]`."""
    return mask.view(-1, *(1 for _ in rows.shape[1:]))


class SharedMoments:
    """Statistics of norms over all ranks of the stage; `moments` None keeps nothing."""

    def __init__(
        self, sum_over_shards: Callable[[Tensor], Tensor], moments: MomentStore | None
    ) -> None:
        self._sum, self._moments = sum_over_shards, moments

    def __getitem__(self, key: CallKey) -> RowMoments:
        """Return the statistics of a call."""
        assert self._moments is not None
        return self._moments[key]

    def keep(
        self, key: CallKey, rows: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute and keep statistics over the rows of all ranks; see `MomentStore`."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        first = rows.sum(0)
        num_nodes = -1 if counts is None else sum(counts)
        share = self._sum(torch.cat([first, first.new_tensor([rows.size(0), num_nodes])]))
        counts = counts if share[-2] == share[-1] else None  # all ranks decide alike
        center = share[:-2] / share[-2].clamp(min=1)
        sums = self._sum(sums_by_chunk(rows, counts, center))
        total = sums.sum(0)
        if self._moments is not None:
            self._moments.put(key, None if counts is None else sums, total, center)
        return *mean_and_var(total, center), total[0]

    def keep_sums(self, key: CallKey, sums: Tensor) -> None:
        """Keep sums over the rows of all ranks, by chunk, `[num_chunks, *]`."""
        if self._moments is not None:
            self._moments.keep_sums(key, self._sum(sums))
