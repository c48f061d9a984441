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


class ZeroHalo:
    """Serves zeros at the cost of real histories, without transfers from another device."""

    shards = None

    def __init__(self, plan: ChunkPlan, options: HistoryOptions) -> None:
        self.moments = MomentStore(plan.num_chunks, _OwnMoments)
        self._num_nodes, self._num_chunks = plan.num_nodes, plan.num_chunks
        self._options, self.is_local = options, options.device is None
        self.linear_scale = options.method.linear_scale  # differs on dense graphs, at the same cost
        self._zeros: dict[object, Tensor] = {}
        self._tables: dict[CallKey, Tensor] = {}
        self._bytes: dict[tuple[CallKey, str], int] = {}  # of rows and of gradients
        self._row_bytes: dict[CallKey, int] = {}

    def history_bytes(self, segment: int) -> int:
        """Return the bytes of a layer's histories and gradient buffers on the compute device."""
        if not self.is_local:
            return 0
        return sum(n for (key, _), n in self._bytes.items() if key.segment == segment)

    def row_bytes(self, segment: int) -> list[int]:
        """Return the bytes of one row in each history of a layer."""
        return [n for key, n in self._row_bytes.items() if key.segment == segment]

    @property
    def by_chunk(self) -> ZeroHalo:
        other = copy.copy(self)
        other._num_nodes, other._row_bytes = self._num_chunks, {}  # rows of chunks, not nodes
        return other

    def push(self, key: CallKey, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        dtype = (self._options.dtype if rows.is_floating_point() else None) or rows.dtype
        table = self._tables[key] = self._table(rows, dtype)
        num_copies = 1 if self._options.method.snapshot_steps is None else 2
        self._bytes[key, "rows"] = num_copies * table.nbytes
        self._row_bytes[key] = rows[:1].nbytes

    def _table(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a table of zeros that layers share, with every page of memory written."""
        shape = (self._num_nodes, *rows.shape[1:])
        if (shape, dtype) not in self._zeros:
            self._zeros[shape, dtype] = rows.new_zeros(shape, dtype=dtype).zero_()
        return self._zeros[shape, dtype]

    def read(self, key: CallKey, chunk: Chunk) -> Tensor:
        return self._tables[key]

    def drift(self, key: CallKey, chunk: Chunk) -> None: ...
    def pull(self, key: CallKey, chunk: Chunk, out: Tensor) -> tuple[int, ...]:
        out.zero_()
        return ()

    def pull_again(
        self, key: CallKey, chunk: Chunk, out: Tensor, stale: Collection[int]
    ) -> None: ...

    def push_grad(self, key: CallKey, chunk: Chunk, grad: Tensor) -> None:
        self._bytes[key, "grads"] = self._table(grad, grad.dtype).nbytes

    def pull_grad(self, key: CallKey, chunk: Chunk, *, is_linear: bool) -> None: ...
    def keep_output(self, key: CallKey, chunk: Chunk, rows: Tensor) -> None: ...
    def kept_output(self, key: CallKey, chunk: Chunk) -> Tensor:
        return self._tables[key][chunk.start : chunk.end]

    def add_output_grad(
        self, key: CallKey, chunk: Chunk, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        table = self._table(grad, self._options.linear_dtype or grad.dtype)
        self._bytes[key, "grads"] = table.nbytes
        return table, None
