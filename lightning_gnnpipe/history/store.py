"""The histories and gradient buffers of one stage: push, pull, and the age of every row.

Rows are kept in the plan's chunk-contiguous order, so a chunk's own rows are one slice. A chunk
writes all its rows at once, so one number a chunk tells the age of its rows. A row that was never
written is never read.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gnnpipe.history.drift import StalenessRecorder
from lightning_gnnpipe.history.moments import MomentStore
from lightning_gnnpipe.history.options import HistoryOptions
from lightning_gnnpipe.history.saved import NEVER, SavedHistory
from lightning_gnnpipe.types import ChunkView


@dataclass(slots=True)
class _Entry:
    """One history: `rows` and, once something was added, `grad`, both `[num_nodes, *]`."""

    rows: Tensor
    written: list[int]  # the step at which each chunk's rows were written
    frozen: Tensor | None = None
    frozen_written: list[int] = field(default_factory=list)
    old: Tensor | None = None  # the rows before this step's, where they are read again
    grad: Tensor | None = None
    has_grad: bool = False
    is_filled: bool = False  # whether every chunk's rows were written
    done: list[int] = field(default_factory=list)  # chunks whose outputs' gradients are in `grad`


_DEFAULTS = HistoryOptions()


class HistoryStore:
    """Histories of one stage over one plan.

    Args:
        num_rows: Rows of each history: nodes, and ghosts of other shards behind them.
        num_chunks: Chunks of the plan, K.
        options: How they are kept.
    """

    def __init__(
        self,
        num_rows: int,
        num_chunks: int,
        options: HistoryOptions = _DEFAULTS,
    ) -> None:
        self.options = options
        self.shards = None  # rows of other ranks are pushed by who has them
        self.num_rows = num_rows
        self.num_chunks = num_chunks
        self.step = 0
        self.recorder: StalenessRecorder | None = None
        self.moments = MomentStore(num_chunks)
        self._entries: dict[Hashable, _Entry] = {}
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with what has it

    @property
    def scale(self) -> float:
        """Factor on gradients between chunks."""
        return self.options.scale

    @property
    def is_local(self) -> bool:
        """Whether histories are where the layers compute, so that they can be read in place."""
        return self.options.device is None

    @property
    def by_chunk(self) -> HistoryStore:
        """The store, for this step, of histories with one row a chunk instead of one a node."""
        other = copy.copy(self)  # of the same entries
        other.num_rows = self.num_chunks
        return other

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def begin_step(self, step: int) -> None:
        """Say that training pass number `step` begins."""
        self.step = step
        self.moments.begin_step()

    def rows(self, key: Hashable) -> Tensor:
        """Return the history under `key`, `[num_rows, *]`, in plan order."""
        return self._entries[key].rows

    def save(self, key: Hashable) -> SavedHistory:
        """Return the history under `key` as it is between two steps; its tensors are not copied."""
        entry = self._entries[key]
        frozen_step = min(entry.frozen_written, default=NEVER)
        return SavedHistory(entry.rows, min(entry.written), entry.frozen, frozen_step)

    def load(self, key: Hashable, saved: SavedHistory) -> None:
        """Go on with a history that was saved; its rows are in this plan's order."""
        entry = self._entry(key, saved.rows)
        entry.rows.copy_(saved.rows)
        entry.written = [saved.step] * self.num_chunks
        entry.is_filled = saved.step != NEVER
        if saved.frozen is not None:
            entry.frozen = torch.empty_like(entry.rows).copy_(saved.frozen)
            entry.frozen_written = [saved.frozen_step] * self.num_chunks

    def push(
        self, key: Hashable, chunk: ChunkView, rows: Tensor, *, keeps_old: bool = False
    ) -> None:
        """Write the chunk's rows, `[num_nodes_of_chunk, *]`; keep what was there if asked to."""
        entry = self._entry(key, rows)
        chunks = range(self.num_chunks) if chunk.is_whole else (chunk.index,)
        target = entry.rows[chunk.start : chunk.end]
        if self.recorder is not None and all(entry.written[c] != NEVER for c in chunks):
            self.recorder.record_drift(key, stale=target, fresh=rows.to(target.device))
        if keeps_old and not chunk.is_whole:
            if entry.old is None:
                entry.old = torch.empty_like(entry.rows)
            entry.old[chunk.start : chunk.end] = target
        target.copy_(rows)
        for c in chunks:
            entry.written[c] = self.step
        entry.is_filled = entry.is_filled or NEVER not in entry.written

    def push_ghosts(
        self, key: Hashable, positions: Tensor, rows: Tensor, *, keeps_old: bool = False
    ) -> None:
        """Write rows of other shards, `[num_positions, *]`, in the chunk that was just pushed."""
        entry = self._entries[key]
        positions = positions.to(entry.rows.device)
        if keeps_old and entry.old is not None:
            entry.old[positions] = entry.rows[positions]
        entry.rows[positions] = rows.to(entry.rows)

    def read(self, key: Hashable, chunk: ChunkView) -> Tensor:
        """Return the history, `[num_rows, *]`, for the chunk to read its halo rows from."""
        entry = self._entries[key]
        if not entry.is_filled:
            assert all(entry.written[c] != NEVER for c in chunk.halo_chunks), "unwritten row"
        if self.recorder is not None:
            ages = [self.step - entry.written[c] for c in chunk.halo_chunks]
            self.recorder.record_reads(key, chunk, ages)
        return entry.rows

    def pull(self, key: Hashable, chunk: ChunkView, out: Tensor) -> set[int]:
        """Read the chunk's halo rows into `out`, `[num_halo, *]`; return which chunks are stale."""
        _select(self.read(key, chunk), self._halo(chunk), out)
        written = self._entries[key].written
        return {c for c in chunk.halo_chunks if written[c] < self.step}

    def pull_again(
        self, key: Hashable, chunk: ChunkView, out: Tensor, stale: Collection[int]
    ) -> None:
        """Read what `pull` read, after later chunks have pushed; `stale` is what it returned."""
        entry = self._entries[key]
        counts = list(chunk.halo_counts)
        parts = torch.split(out, counts), torch.split(self._halo(chunk), counts)
        for source, target, positions in zip(chunk.halo_chunks, *parts, strict=True):
            rows = entry.old if source in stale else entry.rows
            assert rows is not None
            _select(rows, positions, target)

    def push_grad(self, key: Hashable, chunk: ChunkView, grad: Tensor) -> None:
        """Add the gradient of the chunk's halo rows, `[num_halo, *]`."""
        total = self._grad(key, grad.dtype)
        total.index_add_(0, self._halo(chunk), grad.to(total.device))

    def ghost_grad(self, key: Hashable, positions: Tensor) -> Tensor | None:
        """Return what was added for rows of other shards, scaled; None if nothing was."""
        entry = self._entries[key]
        if entry.grad is None or not entry.has_grad:
            return None
        return entry.grad[positions] * self.scale

    def pull_grad(self, key: Hashable, chunk: ChunkView) -> Tensor | None:
        """Return what other chunks have added for the chunk's rows, scaled; None if nobody has."""
        entry = self._entries[key]
        if entry.grad is None or not entry.has_grad:
            return None
        grad = entry.grad[chunk.start : chunk.end].to(chunk.halo.device)
        return grad if self.scale == 1.0 else grad * self.scale

    def keep_output(self, key: Hashable, chunk: ChunkView, rows: Tensor) -> None:
        """Keep the chunk's outputs, `[num_nodes_of_chunk, *]`, until their gradient comes."""
        self._grad(key, self.options.linear_dtype(rows))[chunk.start : chunk.end] = rows

    def kept_output(self, key: Hashable, chunk: ChunkView) -> Tensor:
        """Return a copy of them."""
        kept = self._entries[key].grad
        assert kept is not None
        return kept[chunk.start : chunk.end].clone()

    def add_output_grad(
        self, key: Hashable, chunk: ChunkView, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs, `[num_nodes_of_chunk, *]`.

        Returns:
            `[num_nodes, *]`: those of all chunks since the last `clear_grads`, and these chunks; or
            None for them if it is zero elsewhere.
        """
        total = self._grad(key, self.options.linear_dtype(grad))
        total[chunk.start : chunk.end] = grad
        if not self.options.recomputes:
            return total, None
        done = self._entries[key].done
        done.append(chunk.index)
        return total, tuple(done)

    def clear_grads(self) -> None:
        """Forget what was added for rows that were read stale: they are constants."""
        for entry in self._entries.values():
            entry.done.clear()
            if entry.grad is not None and entry.has_grad:
                entry.grad.zero_()
                entry.has_grad = False

    def freeze(self) -> None:
        """Keep a snapshot of all histories, of which stale reads are served until the next one."""
        for entry in self._entries.values():
            if entry.frozen is None:
                entry.frozen = entry.rows.clone()
            else:
                entry.frozen.copy_(entry.rows)
            entry.frozen_written = list(entry.written)

    def restore(self) -> None:
        """Put the snapshot back into the histories, if there is one."""
        for entry in self._entries.values():
            if entry.frozen is not None:
                entry.rows.copy_(entry.frozen)
                entry.written = list(entry.frozen_written)

    def release_snapshot(self) -> None:
        """Drop the snapshot."""
        for entry in self._entries.values():
            entry.frozen = None

    def _grad(self, key: Hashable, dtype: torch.dtype) -> Tensor:
        entry = self._entries[key]
        if entry.grad is None or entry.grad.dtype != dtype:
            entry.grad = torch.zeros_like(entry.rows, dtype=dtype)
        entry.has_grad = True
        return entry.grad

    def _halo(self, chunk: ChunkView) -> Tensor:
        """Return the positions of the chunk's halo, where the histories are."""
        if self.options.device is None:
            return chunk.halo
        if id(chunk.halo) not in self._halos:
            self._halos[id(chunk.halo)] = chunk.halo, chunk.halo.to(self.options.device)
        return self._halos[id(chunk.halo)][1]

    def _entry(self, key: Hashable, rows: Tensor) -> _Entry:
        entry = self._entries.get(key)
        dtype = (self.options.dtype if rows.is_floating_point() else None) or rows.dtype
        if entry is not None and entry.rows.dtype != dtype:  # under autocast passes may differ
            entry.rows = entry.rows.to(torch.promote_types(entry.rows.dtype, dtype))
        if entry is None:
            shape = (self.num_rows, *rows.shape[1:])
            entry = _Entry(
                torch.empty(shape, dtype=dtype, device=self.options.device or rows.device),
                [NEVER] * self.num_chunks,
            )
            self._entries[key] = entry
        return entry


def _select(rows: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write `rows[positions]` to `out`, without a copy in between where the dtypes are equal."""
    if (rows.dtype, rows.device) == (out.dtype, out.device):
        torch.index_select(rows, 0, positions, out=out)
    else:
        out.copy_(rows.index_select(0, positions))
