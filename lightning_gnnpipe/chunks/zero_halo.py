"""Replaces the histories while layers are timed: reads return zeros, and no rows are stored."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.passing import CallKey
from lightning_gnnpipe.staleness import HistoryOptions, MomentStore, RowMoments


class _OwnMoments(RowMoments):
    """Uses the first chunk's statistics as the statistics of the last step."""

    def sums_of(self, rows: Tensor) -> Tensor:
        if self.total is None:
            dtype = torch.promote_types(rows.dtype, torch.float32)
            self.center = rows.new_zeros(rows.size(1), dtype=dtype)
            self.set([None] * self.num_chunks, super().sums_of(rows))
        return super().sums_of(rows)


class _OwnMomentStore(MomentStore):
    kind = _OwnMoments


class ZeroHalo:
    """Serves zeros at the cost of real histories, without transfers from another device."""

    shards = None

    def __init__(self, plan: ChunkPlan, options: HistoryOptions) -> None:
        self.moments = _OwnMomentStore(plan.num_chunks)
        self._num_nodes, self._num_chunks = plan.num_nodes, plan.num_chunks
        self._options = options
        self._zeros: dict[object, Tensor] = {}
        self.tables: dict[CallKey, Tensor] = {}
        self.table_bytes: dict[CallKey, int] = {}
        self.grad_bytes: dict[CallKey, int] = {}
        self.pushed_row_bytes: dict[CallKey, int] = {}

    @property
    def is_local(self) -> bool:
        return self._options.device is None

    def history_bytes(self, segment: int) -> int:
        """Return the bytes of a layer's histories and gradient buffers on the compute device."""
        if not self.is_local:
            return 0
        kept = (self.table_bytes, self.grad_bytes)
        return sum(n for part in kept for key, n in part.items() if key.segment == segment)

    def row_bytes(self, segment: int) -> list[int]:
        """Return the bytes of one row in each history of a layer."""
        return [n for key, n in self.pushed_row_bytes.items() if key.segment == segment]

    @property
    def by_chunk(self) -> ZeroHalo:
        other = copy.copy(self)
        other._num_nodes, other.pushed_row_bytes = self._num_chunks, {}  # rows of chunks, not nodes
        return other

    @property
    def linear_scale(self) -> float:
        return self._options.method.linear_scale  # differs on dense graphs, at the same cost

    def push(self, key: CallKey, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        dtype = (self._options.dtype if rows.is_floating_point() else None) or rows.dtype
        table = self.tables[key] = self._table(rows, dtype)
        is_kept = self._options.method.snapshot_steps is not None
        self.table_bytes[key] = table.nbytes * (1 + is_kept)
        self.pushed_row_bytes[key] = rows[:1].nbytes

    def _table(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a table of zeros that layers share, with every page of memory written."""
        shape = (self._num_nodes, *rows.shape[1:])
        if (shape, dtype) not in self._zeros:
            self._zeros[shape, dtype] = rows.new_zeros(shape, dtype=dtype).zero_()
        return self._zeros[shape, dtype]

    def read(self, key: CallKey, chunk: Chunk) -> Tensor:
        return self.tables[key]

    def drift(self, key: CallKey, chunk: Chunk) -> None: ...
    def pull(self, key: CallKey, chunk: Chunk, out: Tensor) -> tuple[int, ...]:
        out.zero_()
        return ()

    def pull_again(
        self, key: CallKey, chunk: Chunk, out: Tensor, stale: Collection[int]
    ) -> None: ...

    def push_grad(self, key: CallKey, chunk: Chunk, grad: Tensor) -> None:
        self.grad_bytes[key] = self._table(grad, grad.dtype).nbytes

    def pull_grad(self, key: CallKey, chunk: Chunk, *, is_linear: bool) -> None: ...
    def keep_output(self, key: CallKey, chunk: Chunk, rows: Tensor) -> None: ...
    def kept_output(self, key: CallKey, chunk: Chunk) -> Tensor:
        return self.tables[key][chunk.start : chunk.end]

    def add_output_grad(
        self, key: CallKey, chunk: Chunk, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        table = self._table(grad, self._options.linear_dtype or grad.dtype)
        self.grad_bytes[key] = table.nbytes
        return table, None
