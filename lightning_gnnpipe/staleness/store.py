"""Histories of one stage: push writes a chunk's rows, pull reads its halo rows; their gradients.

Rows are in plan order, so a chunk's rows are one slice, written at once: one age per chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk
from lightning_gnnpipe.staleness.buffers import GradientBuffer, HostCopies, MeanDrift, Wait, done
from lightning_gnnpipe.staleness.method import HistoryOptions
from lightning_gnnpipe.staleness.moments import MomentStore
from lightning_gnnpipe.staleness.recorder import StalenessRecorder

NEVER = -1


@dataclass(slots=True)
class _History:
    """Rows, `[num_rows, *]`, with their gradients, and a snapshot of them (`kept`)."""

    rows: Tensor
    written: list[int]  # for each chunk the step that wrote its rows
    grads: GradientBuffer
    kept: Tensor | None = None
    kept_written: list[int] = field(default_factory=list)
    old: Tensor | None = None  # overwritten rows, for recomputation in backward
    is_filled: bool = False  # whether all chunks have written rows
    drift: MeanDrift | None = None  # if the method corrects drift
    arriving: dict[int, Wait] = field(default_factory=dict)  # copies of chunks to the host

    def settle(self, chunks: Iterable[int] | None = None) -> None:
        """Wait until the rows of `chunks`, by default of all, have arrived."""
        for chunk in list(self.arriving) if chunks is None else chunks:
            self.arriving.pop(chunk, done)()

    def note_all(self) -> None:
        """Restart the drift after all rows were overwritten."""
        if self.drift is not None:
            self.drift.replace(self.rows)

    def take_snapshot(self) -> None:
        self.settle()
        if self.kept is None or self.kept.dtype != self.rows.dtype:
            self.kept = torch.empty_like(self.rows)
        self.kept.copy_(self.rows)
        self.kept_written = list(self.written)

    def restore_snapshot(self) -> None:
        """Copy the snapshot, if there is one, to the rows."""
        if self.kept is not None:
            self.settle()
            self.rows.copy_(self.kept)
            self.written = list(self.kept_written)
            self.note_all()


class ShardLink(Protocol):
    """Connection to the ranks that hold the other shards of each chunk."""

    def ghosts(self, chunk: Chunk) -> Tensor:
        """Return the chunk's rows on other ranks, `[num_ghosts]`, ascending."""

    def give_back(self, key: Hashable, chunk: Chunk, grad: Tensor) -> Tensor:
        """Send gradients of `ghosts` to their ranks; return the received ones, `[num_nodes, *]`."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks of the stage; collective."""


_DEFAULTS = HistoryOptions()


class HistoryStore:
    """Histories of one stage over one plan.

    Args:
        num_rows: Rows of each history: nodes, then ghosts (rows of other shards).
        ends: End position of each chunk; None without drift correction.
        cut_frac: Share of edges between chunks.
    """

    shards: ShardLink | None = None  # exchange with other shards is in `SharedStore`

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
        self.linear_scale = options.method.scale_of_sums(cut_frac)  # on gradients between chunks
        self.num_rows = num_rows
        self.num_chunks = num_chunks
        self._ends = ends
        self.sum_over_shards: Callable[[Tensor], Tensor] | None = None
        self.step = 0
        self.recorder: StalenessRecorder | None = None
        self.moments = MomentStore(num_chunks)
        self._copies = HostCopies(options.device)
        self._entries: dict[Hashable, _History] = {}
        self._pushed: set[Hashable] = set()  # since the last forward phase of training
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the halo, which is kept alive

    @property
    def by_chunk(self) -> HistoryStore:
        """View of this store, for this step, for histories with one row per chunk."""
        other = copy.copy(self)  # shares the entries
        other.num_rows, other._ends = self.num_chunks, None
        return other

    @property
    def num_bytes(self) -> int:
        """Bytes of rows, snapshots, overwritten rows and gradients."""
        entries = self._entries.values()
        tables = [table for one in entries for table in (one.rows, one.kept, one.old)]
        rows = sum(table.nbytes for table in tables if table is not None)
        return rows + sum(one.grads.num_bytes for one in entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def begin_step(self, step: int) -> None:
        self.step = step
        if self.moments.calls:
            self.moments.begin_step()
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
        if takes_snapshot:
            for entry in self._entries.values():
                entry.take_snapshot()
        self._pushed.clear()

    def on_renewed(self) -> None:
        """Renew snapshots after an exact pass outside training has written all rows."""
        for key in self._pushed:
            if self._entries[key].kept is not None:
                self._entries[key].take_snapshot()
        self._pushed.clear()

    def end_step(self) -> None:
        """Clear gradients after the backward of a training step."""
        for entry in self._entries.values():
            entry.grads.end_step()

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
            entry.kept = torch.empty_like(entry.rows).copy_(kept)
            entry.kept_written = [kept_step] * self.num_chunks

    def push(self, key: Hashable, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        """Write the chunk's rows, `[num_nodes, *]`; `keeps_old` keeps the old for `pull_again`."""
        entry = self._entry(key, rows)
        chunks = range(self.num_chunks) if chunk.is_whole else (chunk.index,)
        self._pushed.add(key)
        written, target = entry.written, entry.rows[chunk.start : chunk.end]
        if entry.arriving:
            entry.settle(chunks)
        if self.recorder is not None and all(written[c] != NEVER for c in chunks):
            self.recorder.record_drift(key, stale=target, fresh=rows.to(target.device))
        if keeps_old and not chunk.is_whole:
            if entry.old is None:
                entry.old = torch.empty_like(entry.rows)
            entry.old[chunk.start : chunk.end] = target
        if self.is_local:
            target.copy_(rows)
        else:
            entry.arriving |= dict.fromkeys(chunks, self._copies.send(rows, target))
            target = rows.to(target.dtype)  # as stored, but where the layers compute
        if entry.drift is not None and chunk.is_whole:
            entry.drift.replace(target)
        elif entry.drift is not None:
            entry.drift.move(chunk.index, target, self.sum_over_shards)
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

    def read(self, key: Hashable, chunk: Chunk) -> Tensor:
        """Return the history, `[num_rows, *]`, from which the chunk reads its halo rows."""
        entry = self._entries[key]
        if not entry.is_filled:
            assert all(entry.written[c] != NEVER for c in chunk.halo_chunks), "unwritten row"
        if self.recorder is not None:
            ages = [self.step - entry.written[c] for c in chunk.halo_chunks]
            self.recorder.record_reads(key, chunk, ages)
        if entry.arriving:
            entry.settle(chunk.halo_chunks)
        return entry.rows

    def drift(self, key: Hashable, chunk: Chunk) -> tuple[tuple[int, ...], Tensor] | None:
        """Return the stale ones of `halo_chunks`, if any, and the drift to add to their rows."""
        entry = self._entries[key]
        if entry.drift is None or chunk.is_whole:
            return None
        stale = tuple([c for c in chunk.halo_chunks if entry.written[c] < self.step])
        return (stale, entry.drift.seen[chunk.index]) if stale else None

    def pull(self, key: Hashable, chunk: Chunk, out: Tensor) -> set[int]:
        """Read the halo rows into `out`, `[num_halo, *]`; return which chunks are stale."""
        self._select(self.read(key, chunk), self._halo(chunk), out)
        written = self._entries[key].written
        stale = {c for c in chunk.halo_chunks if written[c] < self.step}
        self._move(key, chunk, out, stale)
        return stale

    def pull_again(self, key: Hashable, chunk: Chunk, out: Tensor, stale: Collection[int]) -> None:
        """Repeat `pull`, which returned `stale`, after later chunks have pushed."""
        entry = self._entries[key]
        entry.settle(chunk.halo_chunks)
        counts = list(chunk.halo_counts)
        parts = torch.split(out, counts), torch.split(self._halo(chunk), counts)
        for source, target, positions in zip(chunk.halo_chunks, *parts, strict=True):
            rows = entry.old if source in stale else entry.rows
            assert rows is not None
            self._select(rows, positions, target)
        self._move(key, chunk, out, stale)

    def _move(self, key: Hashable, chunk: Chunk, halo: Tensor, stale: Collection[int]) -> None:
        """Add the drift to the halo rows, `[num_halo, *]`, of the chunks in `stale`."""
        drift = self._entries[key].drift
        if drift is None or not stale:
            return
        moved = drift.seen[chunk.index].to(halo)
        parts = torch.split(halo, list(chunk.halo_counts))
        for source, part in zip(chunk.halo_chunks, parts, strict=True):
            if source in stale:
                part += moved

    def push_grad(self, key: Hashable, chunk: Chunk, grad: Tensor) -> None:
        """Add the gradient of the chunk's halo rows, `[num_halo, *]`."""
        self._entries[key].grads.add(self._halo(chunk), grad, self._entries[key].rows)

    def pull_grad(self, key: Hashable, chunk: Chunk, *, is_linear: bool) -> Tensor | None:
        """Return the scaled gradient of the chunk's rows; None if none was added."""
        own = slice(chunk.start, chunk.end)
        taken = None if chunk.is_whole else self._entries[key].grads.take(own, is_linear=is_linear)
        if taken is None or self.is_local:
            return taken
        return self._copies.bring(taken, chunk.halo.device)

    def ghost_grad(
        self, key: Hashable, chunk: Chunk, positions: Tensor, *, is_linear: bool
    ) -> Tensor | None:
        """Return the scaled gradient of ghosts in the chunk; None if none was added."""
        if chunk.is_whole:
            return None
        return self._entries[key].grads.take(positions, is_linear=is_linear)

    def keep_output(self, key: Hashable, chunk: Chunk, rows: Tensor) -> None:
        """Keep the chunk's outputs, `[num_nodes_of_chunk, *]`, until their gradient comes."""
        self._entries[key].grads.keep_output(chunk, rows, self._entries[key].rows)

    def kept_output(self, key: Hashable, chunk: Chunk) -> Tensor:
        return self._entries[key].grads.kept_output(chunk)

    def add_output_grad(
        self, key: Hashable, chunk: Chunk, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs; see `GradientBuffer.add_output`."""
        return self._entries[key].grads.add_output(chunk, grad, self._entries[key].rows)

    def _halo(self, chunk: Chunk) -> Tensor:
        """Return the chunk's halo positions on the histories' device."""
        if self.options.device is None:
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
            entry.rows = self._copies.table(shape, wider, device).copy_(entry.rows)
        if entry is None:
            table = self._copies.table(shape, dtype, device)
            grads = GradientBuffer(self.linear_scale, self.options, self._copies)
            entry = self._entries[key] = _History(table, [NEVER] * self.num_chunks, grads)
            if self._ends is not None and rows.is_floating_point():
                entry.drift = MeanDrift(self._ends)
        return entry

    def _select(self, rows: Tensor, positions: Tensor, out: Tensor) -> None:
        """Write `rows[positions]` to `out`, without a temporary if dtype and device are equal."""
        if (rows.dtype, rows.device) == (out.dtype, out.device):
            torch.index_select(rows, 0, positions, out=out)
        else:
            self._copies.fetch(rows, positions, out)
