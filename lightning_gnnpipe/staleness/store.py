"""Histories of one stage: push writes a chunk's rows, pull reads its halo rows.

Rows are in plan order, so a chunk's rows are one slice, written at once: one age per chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.staleness.drift import MeanDrift, StalenessRecorder
from lightning_gnnpipe.staleness.late_gradients import GradientBuffer
from lightning_gnnpipe.staleness.method import HistoryOptions, Rows
from lightning_gnnpipe.staleness.moments import MomentStore
from lightning_gnnpipe.types import ChunkView

NEVER = -1


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """One history between two steps, `[num_nodes, *]` in plan order; `kept`: its snapshot."""

    rows: Tensor
    step: int
    kept: Tensor | None = None
    kept_step: int = NEVER


@dataclass(slots=True)
class _Entry:
    rows: Rows
    grads: GradientBuffer
    old: Tensor | None = None  # overwritten rows, for recomputation in backward
    is_filled: bool = False  # whether all chunks have written rows
    drift: MeanDrift | None = None  # if the method corrects drift

    def note_all(self) -> None:
        """Restart the drift after all rows were overwritten."""
        if self.drift is not None:
            self.drift.replace(self.rows.now)


_DEFAULTS = HistoryOptions()


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
        self.linear_scale = options.method.scale_of_sums(cut_frac)
        self.shards = None  # exchange with other shards is in `SharedStore`
        self.num_rows = num_rows
        self.num_chunks = num_chunks
        self._ends = ends
        self.sum_over_shards: Callable[[Tensor], Tensor] | None = None
        self.step = 0
        self.recorder: StalenessRecorder | None = None
        self.moments = MomentStore(num_chunks)
        self._entries: dict[Hashable, _Entry] = {}
        self._pushed: set[Hashable] = set()  # since the last forward phase of training
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the halo, which is kept alive

    def scale_of(self, key: Hashable) -> float:
        """Return the factor on gradients between chunks for the history."""
        return self._entries[key].grads.linear_scale

    @property
    def is_local(self) -> bool:
        """Whether histories are on the device of the layers and can be read in place."""
        return self.options.device is None

    @property
    def by_chunk(self) -> HistoryStore:
        """View of this store, for this step, for histories with one row a chunk."""
        other = copy.copy(self)  # shares the entries
        other.num_rows, other._ends = self.num_chunks, None
        return other

    @property
    def num_bytes(self) -> int:
        return sum(entry.rows.num_bytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def begin_step(self, step: int) -> None:
        self.step = step
        self.moments.begin_step()
        for entry in self._entries.values():
            if entry.drift is not None:
                entry.drift.begin_step()

    def before_forward(self, *, is_exact: bool, reads_snapshot: bool) -> None:
        """Copy snapshots to the rows for stale reads; drop snapshots that are not used."""
        for entry in self._entries.values():
            if not reads_snapshot:
                entry.rows.kept = None
            elif entry.is_filled and not is_exact and entry.rows.take_kept():
                entry.note_all()

    def after_forward(self, *, takes_snapshot: bool) -> None:
        if takes_snapshot:
            for entry in self._entries.values():
                entry.rows.keep()
        self._pushed.clear()

    def on_renewed(self) -> None:
        """Renew snapshots after an exact pass outside training has written all rows."""
        for key in self._pushed:
            if self._entries[key].rows.kept is not None:
                self._entries[key].rows.keep()
        self._pushed.clear()

    def end_step(self) -> None:
        """Clear gradients after the backward of a training step."""
        for entry in self._entries.values():
            entry.grads.end_step()

    def rows(self, key: Hashable) -> Tensor:
        """Return the history, `[num_rows, *]`, in plan order."""
        return self._entries[key].rows.now

    def save(self, key: Hashable) -> SavedHistory:
        """Return the history between two steps; tensors are not copied."""
        entry = self._entries[key]
        rows = entry.rows
        steps = min(rows.written), min(rows.kept_written, default=NEVER)
        return SavedHistory(rows.now, steps[0], rows.kept, steps[1])

    def load(self, key: Hashable, saved: SavedHistory) -> None:
        """Restore a saved history; its rows must be in this plan's order."""
        entry = self._entry(key, saved.rows)
        rows = entry.rows
        rows.now.copy_(saved.rows)
        rows.written = [saved.step] * self.num_chunks
        entry.is_filled = saved.step != NEVER
        entry.note_all()
        if saved.kept is not None:
            rows.kept = torch.empty_like(rows.now).copy_(saved.kept)
            rows.kept_written = [saved.kept_step] * self.num_chunks

    def push(
        self, key: Hashable, chunk: ChunkView, rows: Tensor, *, keeps_old: bool = False
    ) -> None:
        """Write the chunk's rows, `[num_nodes_of_chunk, *]`.

        `keeps_old` keeps the overwritten rows for `pull_again`.
        """
        entry = self._entry(key, rows)
        self._pushed.add(key)
        chunks = range(self.num_chunks) if chunk.is_whole else (chunk.index,)
        rows_now, written = entry.rows.now, entry.rows.written
        target = rows_now[chunk.start : chunk.end]
        if self.recorder is not None and all(written[c] != NEVER for c in chunks):
            self.recorder.record_drift(key, stale=target, fresh=rows.to(target.device))
        if keeps_old and not chunk.is_whole:
            if entry.old is None:
                entry.old = torch.empty_like(rows_now)
            entry.old[chunk.start : chunk.end] = target
        target.copy_(rows)
        if chunk.is_whole:
            entry.note_all()
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
        table = entry.rows.now
        positions = positions.to(table.device)
        if keeps_old and entry.old is not None:
            entry.old[positions] = table[positions]
        table[positions] = rows.to(table)

    def read(self, key: Hashable, chunk: ChunkView) -> Tensor:
        """Return the history, `[num_rows, *]`, from which the chunk reads its halo rows."""
        entry = self._entries[key]
        if not entry.is_filled:
            written = entry.rows.written
            assert all(written[c] != NEVER for c in chunk.halo_chunks), "unwritten row"
        if self.recorder is not None:
            ages = [self.step - entry.rows.written[c] for c in chunk.halo_chunks]
            self.recorder.record_reads(key, chunk, ages)
        return entry.rows.now

    def drift(self, key: Hashable, chunk: ChunkView) -> tuple[tuple[int, ...], Tensor] | None:
        """Return the stale chunks among `halo_chunks`, and the drift to add to their rows, `[*]`.

        None if no chunk is stale, or without drift correction.
        """
        entry = self._entries[key]
        if entry.drift is None or chunk.is_whole:
            return None
        stale = tuple(c for c in chunk.halo_chunks if entry.rows.written[c] < self.step)
        return (stale, entry.drift.seen_by(chunk.index)) if stale else None

    def pull(self, key: Hashable, chunk: ChunkView, out: Tensor) -> set[int]:
        """Read the halo rows into `out`, `[num_halo, *]`; return which chunks are stale."""
        _select(self.read(key, chunk), self._halo(chunk), out)
        written = self._entries[key].rows.written
        stale = {c for c in chunk.halo_chunks if written[c] < self.step}
        self._move(key, chunk, out, stale)
        return stale

    def pull_again(
        self, key: Hashable, chunk: ChunkView, out: Tensor, stale: Collection[int]
    ) -> None:
        """Repeat `pull`, which returned `stale`, after later chunks have pushed."""
        entry = self._entries[key]
        counts = list(chunk.halo_counts)
        parts = torch.split(out, counts), torch.split(self._halo(chunk), counts)
        for source, target, positions in zip(chunk.halo_chunks, *parts, strict=True):
            rows = entry.old if source in stale else entry.rows.now
            assert rows is not None
            _select(rows, positions, target)
        self._move(key, chunk, out, stale)

    def _move(self, key: Hashable, chunk: ChunkView, halo: Tensor, stale: Collection[int]) -> None:
        """Add the drift to the halo rows, `[num_halo, *]`, of the chunks in `stale`."""
        drift = self._entries[key].drift
        if drift is None or not stale:
            return
        moved = drift.seen_by(chunk.index).to(halo)
        parts = torch.split(halo, list(chunk.halo_counts))
        for source, part in zip(chunk.halo_chunks, parts, strict=True):
            if source in stale:
                part += moved

    def push_grad(self, key: Hashable, chunk: ChunkView, grad: Tensor) -> None:
        """Add the gradient of the chunk's halo rows, `[num_halo, *]`."""
        entry = self._entries[key]
        entry.grads.add(self._halo(chunk), grad, entry.rows.now)

    def ghost_grad(
        self, key: Hashable, chunk: ChunkView, positions: Tensor, *, is_linear: bool
    ) -> Tensor | None:
        """Return the scaled gradient of ghosts in the chunk; None if none was added."""
        return None if chunk.is_whole else self._taken(key, positions, is_linear)

    def pull_grad(self, key: Hashable, chunk: ChunkView, *, is_linear: bool) -> Tensor | None:
        """Return the scaled gradient of the chunk's rows; None if none was added."""
        if chunk.is_whole:
            return None
        taken = self._taken(key, slice(chunk.start, chunk.end), is_linear)
        return None if taken is None else taken.to(chunk.halo.device)

    def keep_output(self, key: Hashable, chunk: ChunkView, rows: Tensor) -> None:
        """Keep the chunk's outputs, `[num_nodes_of_chunk, *]`, until their gradient comes."""
        entry = self._entries[key]
        entry.grads.keep_output(chunk, rows, self.options.linear_dtype(rows), entry.rows.now)

    def kept_output(self, key: Hashable, chunk: ChunkView) -> Tensor:
        return self._entries[key].grads.kept_output(chunk)

    def add_output_grad(
        self, key: Hashable, chunk: ChunkView, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs; see `GradientBuffer.add_output`."""
        entry = self._entries[key]
        dtype = self.options.linear_dtype(grad)
        return entry.grads.add_output(chunk, grad, dtype, entry.rows.now)

    def _taken(self, key: Hashable, rows: slice | Tensor, is_linear: bool) -> Tensor | None:
        return self._entries[key].grads.take(rows, is_linear=is_linear)

    def _halo(self, chunk: ChunkView) -> Tensor:
        """Return the chunk's halo positions on the histories' device."""
        if self.options.device is None:
            return chunk.halo
        if id(chunk.halo) not in self._halos:
            self._halos[id(chunk.halo)] = chunk.halo, chunk.halo.to(self.options.device)
        return self._halos[id(chunk.halo)][1]

    def _entry(self, key: Hashable, rows: Tensor) -> _Entry:
        entry = self._entries.get(key)
        dtype = (self.options.dtype if rows.is_floating_point() else None) or rows.dtype
        if entry is not None and entry.rows.now.dtype != dtype:  # under autocast passes may differ
            entry.rows.now = entry.rows.now.to(torch.promote_types(entry.rows.now.dtype, dtype))
        if entry is None:
            shape = (self.num_rows, *rows.shape[1:])
            table = torch.empty(shape, dtype=dtype, device=self.options.device or rows.device)
            grads = GradientBuffer(self.linear_scale, self.options.method.message_scale)
            entry = self._entries[key] = _Entry(Rows(table, [NEVER] * self.num_chunks), grads)
            if self._ends is not None and rows.is_floating_point():
                entry.drift = MeanDrift(self._ends)
        return entry


def _select(rows: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write `rows[positions]` to `out`, without a temporary if dtype and device are equal."""
    if (rows.dtype, rows.device) == (out.dtype, out.device):
        torch.index_select(rows, 0, positions, out=out)
    else:
        out.copy_(rows.index_select(0, positions))
