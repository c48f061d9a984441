"""Histories of one stage: push writes a chunk's rows, its halo rows are read; their gradients.

Rows are in plan order, so a chunk's rows are one slice, written at once: one age per chunk. A step
also collects, chunk by chunk, the mean drift of rows and, for callbacks, the staleness of reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk
from lightning_gnnpipe.staleness.copies import HostCopies, Wait, done
from lightning_gnnpipe.staleness.method import HistoryOptions
from lightning_gnnpipe.staleness.moments import FLOOR, MomentStore, RowMoments, float_of

NEVER = -1
_DEFAULTS = HistoryOptions()
_order_numbers = itertools.count(1)  # unique over all stores, as they share adjacency matrices


class HistoryStore:
    """Histories of one stage over one plan.

    Args:
        num_rows: Rows of each history: nodes, then ghosts (rows of other shards).
        ends: End position of each chunk; None without drift correction.
        cut_frac: Share of edges between chunks.
    """

    def __init__(
        self,
        num_rows: int,
        num_chunks: int,
        options: HistoryOptions = _DEFAULTS,
        ends: Sequence[int] | None = None,
        cut_frac: float = 0.0,
    ) -> None:
        self.options = options
        # Whether histories are on the device of the layers and can be read in place.
        self.is_local = options.device is None
        # Factors on gradients between chunks: of weighted sums, and of all other layers.
        self.linear_scale = options.method.scale_of_sums(cut_frac)
        self.message_scale = options.method.message_scale
        self.num_rows = num_rows
        self.num_chunks = num_chunks
        self._ends = ends
        self.order = StepOrder(num_chunks)
        self.sum_over_shards: Callable[[Tensor], Tensor] | None = None
        self.step = 0
        self.recorder: StalenessRecorder | None = None
        self.moments = MomentStore(num_chunks)
        self.copies = HostCopies(options.device, options.folder)
        self._entries: dict[Hashable, _History] = {}
        self._pushed: set[Hashable] = set()  # since the last forward phase of training
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the halo, which is kept alive

    @property
    def shards(self) -> Any:
        """The store itself if it is shared with other shards (`engine.shared`); else None."""
        return None

    @property
    def sizes(self) -> list[int]:
        """Nodes of each chunk, whose changes are summed for the drift."""
        ends = range(1, self.num_chunks + 1) if self._ends is None else self._ends
        return [end - start for start, end in pairwise([0, *ends])]

    @property
    def num_bytes(self) -> int:
        """Bytes of rows, snapshots, overwritten rows and gradients."""
        entries = self._entries.values()
        tables = [table for one in entries for table in (one.rows, one.kept, one.old)]
        rows = sum(table.nbytes for table in tables if table is not None)
        return rows + sum(one.grads.num_bytes for one in entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def begin_step(self, step: int, order: Sequence[int] | None = None) -> None:
        """Begin a training step over the chunks in `order`; None for one over the whole graph."""
        self.step = step
        if order is not None:
            self.order.set(order, self.sizes, self._ends[-1] if self._ends else 1)
        if self.moments.calls:
            self.moments.begin_step(self.order)
        for entry in self._entries.values():
            if entry.drift is not None:
                entry.drift.begin_step()

    def before_forward(self, *, is_exact: bool, reads_snapshot: bool) -> None:
        """Copy snapshots to the rows for stale reads; drop snapshots that are not used."""
        for entry in self._entries.values():
            if not reads_snapshot:
                entry.kept = None
            elif entry.is_filled and not is_exact:
                entry.restore_snapshot()

    def after_forward(self, *, takes_snapshot: bool) -> None:
        if self.moments.calls:
            self.moments.after_forward()
        if takes_snapshot:
            for entry in self._entries.values():
                entry.take_snapshot(self.copies)
        self._pushed.clear()

    def on_renewed(self) -> None:
        """Renew snapshots after an exact pass outside training has written all rows."""
        for key in self._pushed:
            if self._entries[key].kept is not None:
                self._entries[key].take_snapshot(self.copies)
        self._pushed.clear()

    def end_step(self) -> None:
        """Clear gradients after the backward of a training step."""
        for entry in self._entries.values():
            entry.grads.end_step()

    def prepare(self) -> None:
        """Let CUDA graphs take gradients where none was added yet."""
        for entry in self._entries.values():
            entry.grads.open()

    def memory(self) -> list[int | None] | None:
        """Return addresses of tensors that steps write in place; None if shapes may change."""
        held = [one for entry in self._entries.values() for one in entry.held()]
        for moments in self.moments.calls.values():
            if moments.shares is None:
                return None
            held.append(moments.shares)
        return [None if one is None else one.data_ptr() for one in held]

    def ran(self, chunk: Chunk) -> Ran:
        """Return what a chunk has written in this step; see `note`."""
        entries = [e for e in self._entries.values() if e.written[chunk.index] == self.step]
        return entries, [one for one in self.moments.calls.values() if one.has_run(chunk.index)]

    def note(self, ran: Ran, chunk: Chunk) -> None:
        """Note that a CUDA graph has run `chunk`, which has written `ran` in an earlier step."""
        histories, moments = ran
        for entry in histories:
            entry.written[chunk.index] = self.step
        for one in moments:
            one.note(chunk.index)

    def forget(self, chunk: Chunk) -> None:
        """Let a chunk whose capture has failed run again."""
        for one in self.moments.calls.values():
            one.forget(chunk.index)

    def rows(self, key: Hashable) -> Tensor:
        """Return the history, `[num_rows, *]`, in plan order."""
        self._entries[key].settle()
        return self._entries[key].rows

    def save(self, key: Hashable) -> dict[str, Any]:
        """Return the arguments of `load`, between two steps; tensors are not copied."""
        rows, entry = self.rows(key), self._entries[key]
        steps = {"step": min(entry.written), "kept_step": min(entry.kept_written, default=NEVER)}
        return {"rows": rows, "kept": entry.kept, **steps}

    def load(
        self, key: Hashable, rows: Tensor, kept: Tensor | None, step: int, kept_step: int
    ) -> None:
        """Restore rows and snapshot, `[num_rows, *]`, which must be in this plan's order."""
        entry = self._entry(key, rows)
        entry.settle()
        entry.rows.copy_(rows)
        entry.written = [step] * self.num_chunks
        entry.is_filled = step != NEVER
        entry.note_all()
        if kept is not None:
            entry.kept = entry.new_table(self.copies).copy_(kept)
            entry.kept_written = [kept_step] * self.num_chunks

    def push(self, key: Hashable, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        """Write the chunk's rows, `[num_nodes, *]`; `keeps_old` keeps the old for `read_again`."""
        entry = self._entries.get(key)
        if entry is None or entry.given != rows.dtype:
            entry = self._entry(key, rows)
        chunks = range(self.num_chunks) if chunk.is_whole else (chunk.index,)
        self._pushed.add(key)
        written, target = entry.written, entry.rows[chunk.start : chunk.end]
        if entry.arriving:
            entry.settle(chunks)
        recorder = self.recorder if rows.is_floating_point() else None
        if recorder is not None and all(written[c] != NEVER for c in chunks):
            recorder.record_drift(key, stale=target, fresh=rows.to(target.device))
        if keeps_old and not chunk.is_whole:
            if entry.old is None:
                entry.old = entry.new_table(self.copies)
            entry.old[chunk.start : chunk.end] = target
        if self.is_local:
            target.copy_(rows)
        else:
            entry.arriving |= dict.fromkeys(chunks, self.copies.send(rows, target))
            target = rows.to(target.dtype)  # as stored, but where the layers compute
        if entry.drift is not None and chunk.is_whole:
            entry.drift.replace(target)
        elif entry.drift is not None:
            entry.drift.move(chunk.index, target, self.sum_over_shards, is_kept=keeps_old)
        for c in chunks:
            written[c] = self.step
        entry.is_filled = entry.is_filled or NEVER not in written

    def push_ghosts(
        self, key: Hashable, positions: Tensor, rows: Tensor, *, keeps_old: bool = False
    ) -> None:
        """Write rows of other shards, `[num_positions, *]`, after `push` of their chunk."""
        entry = self._entries[key]
        if keeps_old and entry.old is not None:
            entry.old[positions] = entry.rows[positions]
        entry.rows[positions] = rows.to(entry.rows)

    def read(self, key: Hashable, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Return the history, `[num_rows, *]`, from which the chunk reads its halo rows.

        And `MeanDrift.total`, `[channels]`; None if the method corrects no drift.
        """
        entry = self._entries[key]
        if not entry.is_filled:
            assert all(entry.written[c] != NEVER for c in chunk.halo_chunks), "unwritten row"
        if self.recorder is not None:
            ages = [self.step - entry.written[c] for c in chunk.halo_chunks]
            self.recorder.record_reads(key, chunk, ages)
        if entry.arriving:
            entry.settle(chunk.halo_chunks)
        return entry.rows, None if entry.drift is None or chunk.is_whole else entry.drift.total

    def fetch(self, table: Tensor, chunk: Chunk, out: Tensor) -> None:
        """Copy the halo rows of a history to `out`, `[num_halo, *]`, of another dtype or device."""
        self.copies.fetch(table, self._halo(chunk), out)

    def read_again(self, key: Hashable, chunk: Chunk, out: Tensor) -> Tensor | None:
        """Write the halo rows to `out`, `[num_halo, *]`, as `read` gave them; return the drift."""
        entry = self._entries[key]
        entry.settle(chunk.halo_chunks)
        counts = list(chunk.halo_counts)
        parts = torch.split(out, counts), torch.split(self._halo(chunk), counts)
        for source, target, positions in zip(chunk.halo_chunks, *parts, strict=True):
            rows = entry.old if self.order.is_stale(chunk.index, source) else entry.rows
            assert rows is not None
            self.copies.fetch(rows, positions, target)
        return None if entry.drift is None or chunk.is_whole else entry.drift.seen[chunk.index]

    def push_grad(self, key: Hashable, chunk: Chunk, grad: Tensor) -> None:
        """Add the gradient of the chunk's halo rows, `[num_halo, *]`."""
        positions = chunk.halo if self.is_local else self._halo(chunk)
        self._entries[key].grads.add(positions, grad)

    def add_grad(self, key: Hashable, chunk: Chunk, own: Tensor, *, is_linear: bool) -> Tensor:
        """Return the gradient of the chunk's rows: its `own` and, scaled, that of other chunks."""
        rows = slice(chunk.start, chunk.end)
        taken = None if chunk.is_whole else self._entries[key].grads.take(rows)
        if taken is None:
            return own
        if not self.is_local:
            taken = self.copies.bring(taken, own.device)
        scale = self.linear_scale if is_linear else self.message_scale
        return torch.add(own, taken.to(own.dtype), alpha=scale)

    def grads(self, key: Hashable) -> GradientBuffer:
        return self._entries[key].grads

    def add_output(
        self, key: Hashable, chunk: Chunk, grad: Tensor
    ) -> tuple[GradientBuffer, Tensor]:
        """Write the gradient of a linear layer's outputs; return the buffer and its table."""
        buffer = self._entries[key].grads
        return buffer, buffer.add_output(chunk, grad)

    def _halo(self, chunk: Chunk) -> Tensor:
        """Return the chunk's halo positions on the histories' device."""
        if self.is_local:
            return chunk.halo
        if id(chunk.halo) not in self._halos:
            self._halos[id(chunk.halo)] = chunk.halo, chunk.halo.to(self.options.device)
        return self._halos[id(chunk.halo)][1]

    def _entry(self, key: Hashable, rows: Tensor) -> _History:
        entry = self._entries.get(key)
        dtype = (self.options.dtype if rows.is_floating_point() else None) or rows.dtype
        device, shape = self.options.device or rows.device, (self.num_rows, *rows.shape[1:])
        if entry is not None and entry.rows.dtype != dtype:  # under autocast passes may differ
            entry.settle()
            wider = torch.promote_types(entry.rows.dtype, dtype)
            entry.rows = self.copies.table(shape, wider, device).copy_(entry.rows)
        if entry is None:
            table = self.copies.table(shape, dtype, device)
            grads = GradientBuffer(table, self.options, self.copies)
            entry = self._entries[key] = _History(table, [NEVER] * self.num_chunks, grads)
            if self._ends is not None and rows.is_floating_point():
                entry.drift = MeanDrift(self._ends)
        entry.given = rows.dtype
        return entry


@dataclass(slots=True)
class _History:
    """Rows, `[num_rows, *]`, with their gradients, and a snapshot of them (`kept`)."""

    rows: Tensor
    written: list[int]  # for each chunk the step that wrote its rows
    grads: GradientBuffer
    given: torch.dtype | None = None  # of the rows pushed last
    kept: Tensor | None = None
    kept_written: list[int] = field(default_factory=list)
    old: Tensor | None = None  # overwritten rows, for recomputation in backward
    is_filled: bool = False  # whether all chunks have written rows
    drift: MeanDrift | None = None  # if the method corrects drift
    arriving: dict[int, Wait] = field(default_factory=dict)  # copies of chunks to the host

    def held(self) -> list[Tensor | None]:
        """Return what steps write in place."""
        moved = [] if self.drift is None else self.drift.held()
        return [self.rows, self.grads.total, *moved]

    def settle(self, chunks: Iterable[int] | None = None) -> None:
        """Wait until the rows of `chunks`, by default of all, have arrived."""
        for chunk in list(self.arriving) if chunks is None else chunks:
            self.arriving.pop(chunk, done)()

    def note_all(self) -> None:
        """Restart the drift after all rows were overwritten."""
        if self.drift is not None:
            self.drift.replace(self.rows)

    def new_table(self, copies: HostCopies) -> Tensor:
        """Return memory like the rows."""
        return copies.table(self.rows.shape, self.rows.dtype, self.rows.device)

    def take_snapshot(self, copies: HostCopies) -> None:
        self.settle()
        if self.kept is None or self.kept.dtype != self.rows.dtype:
            self.kept = self.new_table(copies)
        self.kept.copy_(self.rows)
        self.kept_written = list(self.written)

    def restore_snapshot(self) -> None:
        """Copy the snapshot, if there is one, to the rows."""
        if self.kept is not None:
            self.settle()
            self.rows.copy_(self.kept)
            self.written = list(self.kept_written)
            self.note_all()


Ran = tuple[list[_History], list[RowMoments]]
_Compute = Callable[[Tensor], Tensor]
_Kept = tuple[Tensor, _Compute]


class StepOrder:
    """Which chunks are stale for which in a step, as numbers in tensors.

    A step writes new numbers to tensors that stay in place. So a chunk runs the same operations on
    the same memory in each step, whatever the order.

    Attributes:
        chunks: In the order of the forward phase.
        number: Unique to this order and these sizes, over all stores.
    """

    def __init__(self, num_chunks: int) -> None:
        self.number, self._num_chunks = 0, num_chunks
        self.chunks: tuple[int, ...] = ()
        self._sizes: tuple[int, ...] = ()
        # By name, dtype and device: the numbers of this order, and how to find them.
        self._numbers: dict[tuple[Hashable, torch.dtype, torch.device], _Kept] = {}
        self._owners: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the halo, which is kept
        self.set(range(num_chunks), [1] * num_chunks, num_chunks)

    def set(self, order: Sequence[int], sizes: Sequence[int], num_rows: int) -> None:
        """Begin a step in `order`.

        `sizes`: nodes of each chunk over all shards; `num_rows`: nodes of this shard.
        """
        if (*order,) == self.chunks and (*sizes,) == self._sizes:
            return
        self.chunks, self._sizes, self.number = (*order,), (*sizes,), next(_order_numbers)
        chunks = torch.tensor(self.chunks, device="cpu")
        places = torch.empty_like(chunks)
        places[chunks] = torch.arange(self._num_chunks, device="cpu")
        self._places = places.tolist()
        self._stale = (places > places.unsqueeze(1)).double()  # `[reader, source]`
        num_run = torch.tensor(sizes, dtype=torch.float64, device="cpu")[chunks].cumsum(0)
        self._by_drift = self._stale * (num_rows / (FLOOR + num_run))[places].unsqueeze(1)
        for kept, compute in self._numbers.values():
            _write(compute(kept), kept)

    def is_stale(self, reader: int, source: int) -> bool:
        """Whether `reader` runs before `source`."""
        return self._places[reader] < self._places[source]

    def by_drift(self, reader: int, like: Tensor) -> Tensor:
        """Return by source chunk the factor of the drift for stale rows, else 0, `[num_chunks]`.

        `MeanDrift.total` times the factor is the mean change, with `FLOOR` unchanged rows.
        """
        return self.kept("drift", like, lambda _: self._by_drift)[reader]

    def halo_by_drift(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return `by_drift` of each halo row, `[num_halo]`."""
        key = id(chunk.halo)
        if key not in self._owners:
            counts = torch.tensor(chunk.halo_counts, device="cpu")
            owners = torch.tensor(chunk.halo_chunks, device="cpu").repeat_interleave(counts)
            self._owners[key] = chunk.halo, without_waiting(owners, like.device)
        owners = self._owners[key][1]
        return self.kept(key, like, lambda kept: self.by_drift(chunk.index, kept)[owners])

    def has_run(self, source: int, like: Tensor) -> Tensor:
        """Return by chunk 1 if it reads fresh rows of `source`, else 0, `[num_chunks]`."""
        return self.kept("fresh", like, lambda _: 1 - self._stale.t())[source]

    def kept(self, name: Hashable, like: Tensor, compute: _Compute) -> Tensor:
        """Return what `compute` returns for this order, as `like`, at a fixed address.

        `compute` is called with a tensor like `like`, and may depend on the order only.
        """
        key = name, like.dtype, like.device
        if key not in self._numbers:
            values = compute(like)
            kept = like.new_empty(values.shape)
            _write(values, kept)
            self._numbers[key] = kept, compute
        return self._numbers[key][0]


def _write(values: Tensor, kept: Tensor) -> None:
    values = values.to(kept.dtype)
    kept.copy_(values if values.device == kept.device else without_waiting(values, kept.device))


def without_waiting(small: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`; from pinned memory the host need not wait."""
    return small.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else small


class GradientBuffer:
    """Gradients of one history's rows, or of the outputs of a linear layer over it; in plan order.

    Backward takes the chunks in reverse order. A chunk takes the gradients added for its rows, and
    adds gradients for its halo rows. For stale halo rows they come too late and are dropped:

        dH[c] = d from chunk c itself + scale (d from later chunks in the order)

    Scale 1 is the exact gradient with stale rows as constants. Scale 2 compensates for dropped
    gradients: unbiased for each edge over random orders, biased for paths over several chunks.
    Source: GNNPipe (arXiv 2308.10087), technique 3, for a scale of 2.
    """

    def __init__(self, rows: Tensor, options: HistoryOptions, copies: HostCopies) -> None:
        self._shape, self._device = rows.shape, rows.device
        self._copies, self._dtype = copies, options.linear_dtype
        self._arriving: list[tuple[Tensor, Tensor, Wait]] = []  # positions, gradients on the way
        self.total: Tensor | None = None
        self._has_any = False
        self.kept: Tensor | None = None  # outputs, until gradients overwrite them

    @property
    def num_bytes(self) -> int:
        return 0 if self.total is None else self.total.nbytes

    def open(self) -> None:
        """Let chunks take zeros before any gradient is added: each step runs the same kernels."""
        self._has_any = self.total is not None

    def add(self, positions: Tensor, grad: Tensor) -> None:
        """Add the gradient of halo rows, `[num_halo, *]`."""
        total = self.total
        if total is None or total.dtype != grad.dtype or not self._has_any:
            total = self._table(grad.dtype)
        if total.device == grad.device:
            total.index_add_(0, positions, grad)
            return
        place = self._copies.buffer(grad.shape, grad.dtype, total.device)
        self._arriving.append((positions, place, self._copies.send(grad, place)))

    def take(self, rows: slice | Tensor) -> Tensor | None:
        """Return the unscaled gradient of `rows`, `[num_taken, *]`; None if none was added."""
        if self.total is None or not self._has_any:
            return None
        for positions, late, wait in self._arriving:
            wait()
            self.total.index_add_(0, positions, late)
        self._arriving.clear()
        return self.total[rows]

    def add_output(self, chunk: Chunk, grad: Tensor) -> Tensor:
        """Write the gradient of the chunk's outputs, `[num_nodes_of_chunk, *]`.

        Returns the buffer, `[num_rows, *]`. Chunks that await backward hold 0, or outputs (`kept`).
        """
        total = self._table(self._dtype or grad.dtype)
        total[chunk.start : chunk.end] = grad
        return total

    def keep_output(self, chunk: Chunk, rows: Tensor) -> None:
        """Keep the chunk's outputs in the buffer until their gradient overwrites them."""
        self.kept = self._table(self._dtype or rows.dtype)
        self.kept[chunk.start : chunk.end] = rows

    def kept_output(self, chunk: Chunk) -> Tensor:
        assert self.kept is not None
        return self.kept[chunk.start : chunk.end].clone()

    def end_step(self) -> None:
        self._arriving.clear()
        if self.total is not None and self._has_any:
            self.total.zero_()
            self._has_any = False

    def _table(self, dtype: torch.dtype) -> Tensor:
        """Return the buffer, shaped like the history; a change of dtype clears it."""
        if self.total is None or self.total.dtype != dtype:
            self._arriving.clear()
            self.total = self._copies.table(self._shape, dtype, self._device).zero_()
        self._has_any = True
        return self.total


class MeanDrift:
    """Change of one history's rows within a step: an optimizer step changes most rows alike.

    `total`, `[channels]`: (row now - row then), summed over the chunks that have run, divided by
    the number of all rows to fit half types. Stale rows are assumed to have moved by the mean of
    these changes and `FLOOR` zeros, see `StepOrder.by_drift`. Autograd treats stale rows and drift
    as constants. `ends` are the end positions of the chunks.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._bounds, self._share = list(pairwise([0, *ends])), 1 / max(ends[-1], 1)
        self._sums, self._signs, self.total = torch.empty(0, 2), torch.empty(0), torch.empty(0)
        self.begin_step()

    def begin_step(self) -> None:
        self._sums[:, 1] = self._sums[:, 0]
        self.total.zero_()
        self.seen: dict[int, Tensor] = {}  # `total` up to and including each chunk, if kept

    def held(self) -> list[Tensor | None]:
        return [self._sums, self._signs, self.total]

    def replace(self, rows: Tensor) -> None:
        """Start from new rows, `[num_rows, *]`, after all were overwritten."""
        dtype = float_of(rows.dtype)
        sums = [rows[start:end].sum(0, dtype=dtype).flatten() for start, end in self._bounds]
        now = torch.stack(sums)
        if len(self._sums) != len(now) or self._sums.device != now.device:
            self._sums = torch.stack([now, now], 1)  # now and then, `[num_chunks, 2, channels]`
            self._signs = now.new_tensor([self._share, -self._share])
            self.total = torch.zeros_like(now[0])
            return
        self._sums.copy_(now.unsqueeze(1))
        self.total.zero_()

    def move(
        self,
        chunk: int,
        rows: Tensor,
        sum_over_shards: Callable[[Tensor], Tensor] | None,
        *,
        is_kept: bool,
    ) -> None:
        """Add the change of a chunk that has run; `sum_over_shards`: over its ranks, if several.

        `is_kept`: whether `read_again` will need the drift at this chunk.
        """
        if self._sums.device != rows.device:  # the first sums may be on the host
            held = (self._sums, self._signs, self.total)
            self._sums, self._signs, self.total = (one.to(rows.device) for one in held)
        both = self._sums[chunk]
        flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
        torch.sum(flat, 0, dtype=both.dtype, out=both[0])
        if sum_over_shards is None:  # with `out` autocast leaves the product alone
            torch.addmv(self.total, both.t(), self._signs, out=self.total)
        else:
            self.total.add_(sum_over_shards(both[0] - both[1]), alpha=self._share)
        if is_kept:
            self.seen[chunk] = self.total.clone()


@dataclass(slots=True)
class Staleness:
    """Sums over the reads of one history in one step.

    Attributes:
        rows: Number of embeddings read of nodes in other chunks.
        stale_rows: Number of these that were written in an earlier step.
        age_sum: Sum of the ages of the stale rows, in steps.
        drift_sq: Squared Frobenius norm of fresh minus stale values, over all overwritten rows.
        norm_sq: Squared Frobenius norm of the fresh values.
        stale_pairs: Chunks (reader, source) of the stale reads, in the order read.
    """

    rows: int = 0
    stale_rows: int = 0
    age_sum: int = 0
    drift_sq: float = 0.0
    norm_sq: float = 0.0
    stale_pairs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """Relative drift |H_stale - H_fresh| / |H_fresh|; 0 if no row was overwritten."""
        return float((self.drift_sq / self.norm_sq) ** 0.5) if self.norm_sq > 0 else 0.0

    def add(self, other: Staleness) -> None:
        for name in (one.name for one in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class StalenessRecorder:
    """Collects the `Staleness` of each history while attached to a store."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Staleness] = {}
        self._squares: dict[Hashable, Tensor] = {}  # `drift_sq`, `norm_sq`, still on the device

    @property
    def by_key(self) -> dict[Hashable, Staleness]:
        """The statistics of each history; waits for the device."""
        for key, squares in self._squares.items():
            self._by_key[key].drift_sq, self._by_key[key].norm_sq = squares.tolist()
        return self._by_key

    def record_reads(self, key: Hashable, chunk: Chunk, ages: Sequence[int]) -> None:
        """Record halo reads of `chunk`; `ages` of its `halo_chunks` are in steps."""
        entry = self._by_key.setdefault(key, Staleness())
        for source, count, age in zip(chunk.halo_chunks, chunk.halo_counts, ages, strict=True):
            entry.rows += count
            if age > 0:
                entry.stale_rows += count
                entry.age_sum += age * count
                entry.stale_pairs.append((chunk.index, source))

    def record_drift(self, key: Hashable, *, stale: Tensor, fresh: Tensor) -> None:
        """Compare the old and new rows of a chunk, `[num_nodes_of_chunk, *]`."""
        self._by_key.setdefault(key, Staleness())
        with torch.no_grad():
            both = torch.stack([_sum_squares(fresh - stale), _sum_squares(fresh)])
            self._squares[key] = self._squares[key] + both if key in self._squares else both


def _sum_squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of `rows`, `[num_rows, *]`, in double precision.

    The sum over one row is in its own precision, at least single.
    """
    wide = rows.to(float_of(rows.dtype)).flatten(1) if rows.dim() > 1 else rows.double()
    norms = torch.linalg.vector_norm(wide, dim=-1)
    return norms.double().square().sum()
