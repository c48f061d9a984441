"""The graph as a sparse matrix, and products of some of its rows with a dense table.

On a GPU a kernel in Triton computes them, see `row_sums.py`; on a CPU `embedding_bag` does. With
both, bits repeat from run to run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnnpipe.errors import first_line
from lightning_gnnpipe.graph import Chunk, starts_of
from lightning_gnnpipe.staleness import StepOrder

log = logging.getLogger(__name__)

_Key = tuple[Any, ...]
Keep = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Some rows of a sparse matrix."""

    offsets: Tensor  # `[num_rows + 1]` start of each row in `indices`
    indices: Tensor  # `[num_entries]` columns
    values: Tensor | None  # `[num_entries]`; None for ones
    cuts: dict[int, Any] = field(default_factory=dict)  # of `offsets`, which `replace` must keep


class Pattern:
    """The edges of a graph, sorted by target and, once asked for, by source.

    `edges`: positions, sorted by target. `num_nodes`: with the ghosts of a shard. `chunk_of_row`:
    `[num_nodes]`. `keep` returns a tensor with a value an edge, or its copy in a file.
    """

    def __init__(self, edges: Tensor, num_nodes: int, chunk_of_row: Tensor, keep: Keep) -> None:
        small = max(num_nodes, edges.size(1)) < 2**31 - 64  # kernels count a little beyond
        dtype = torch.int32 if small else torch.int64
        source, target = edges
        self.sources, self.starts = keep(source.to(dtype)), starts_of(target, num_nodes).to(dtype)
        self.chunk_of_row, self.keep = chunk_of_row, keep

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that have a number for each edge."""
        made = (vars(self).get(name) for name in ("sources", "order", "targets_by_source"))
        return sum(one.nbytes for one in made if one is not None)

    @cached_property
    def order(self) -> Tensor:
        return self.keep(self.sources.argsort(stable=True).to(self.sources.dtype))

    @cached_property
    def targets_by_source(self) -> Tensor:
        rows = torch.arange(self.starts.numel() - 1, device=self.starts.device)
        return self.keep(self.by_target(rows.to(self.starts.dtype)).index_select(0, self.order))

    @cached_property
    def starts_by_source(self) -> Tensor:
        return starts_of(self.sources, self.starts.numel() - 1).to(self.starts.dtype)

    def by_target(self, rows: Tensor) -> Tensor:
        """Return for each edge the row of its target, of `[num_nodes]`."""
        return rows.repeat_interleave(self.starts.diff(), output_size=self.sources.numel())

    def find_cross(self) -> Tensor:
        """Return for each edge by source whether it joins two chunks."""
        own = self.chunk_of_row.to(self.starts.dtype)
        counts = self.starts_by_source.diff()
        of_source = own.repeat_interleave(counts, output_size=self.sources.numel())
        return of_source != own.index_select(0, self.targets_by_source)


class Adjacency:
    """A pattern with values, `[num_edges]` by target; `is_mean` divides by the target's degree."""

    def __init__(self, pattern: Pattern, values: Tensor | None, *, is_mean: bool) -> None:
        self._pattern, self._values, self._is_mean = pattern, values, is_mean
        _ = pattern.targets_by_source  # sorted now, while few activations take memory
        self._typed: dict[_Key, Tensor | None] = {}
        self._parts: dict[_Key, SparseRows] = {}
        self._sums: dict[_Key, tuple[int, Tensor | None, Chunk]] = {}  # see `drift_sums`
        self._masked: tuple[object, SparseRows] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of values that are not the graph's own."""
        made = (one for one in self._typed.values() if one is not self._values)
        return sum(one.nbytes for one in made if one is not None)

    def rows(self, chunk: Chunk, dtype: torch.dtype) -> SparseRows:
        """Return the chunk's rows: the edges that end in it, columns are their sources."""
        key = ("rows", chunk.start, chunk.end, dtype)
        if key not in self._parts:
            values = self._in_order(dtype, by_source=False, scale=1.0)
            self._parts[key] = _cut(chunk, self._pattern.starts, self._pattern.sources, values)
        return self._parts[key]

    def drift_sums(self, chunk: Chunk, order: StepOrder, like: Tensor) -> Tensor:
        """Return each row's sum of entries times `StepOrder.by_drift` of columns, `[num_nodes]`."""
        key = chunk.index, like.dtype
        number, sums, _ = self._sums.get(key, (0, None, chunk))
        if number != order.number:
            factors = order.by_drift(chunk.index, like)[self._pattern.chunk_of_row]
            found = multiply(self.rows(chunk, like.dtype), factors.unsqueeze(1)).squeeze(1)
            sums = found if sums is None else sums.copy_(found)
            self._sums[key] = order.number, sums, chunk
        assert sums is not None
        return sums

    def refresh(self, order: StepOrder) -> None:
        """Write the numbers of `order` to all tensors that `drift_sums` has returned."""
        for _, sums, chunk in list(self._sums.values()):
            assert sums is not None
            self.drift_sums(chunk, order, sums)

    def block(self, chunk: Chunk, dtype: torch.dtype, *, by_source: bool) -> SparseRows:
        """Return rows or columns of a chunk without cross-chunk edges, in local indices."""
        key = ("block", chunk.start, chunk.end, dtype, by_source)
        if key not in self._parts:
            part = self.columns(chunk, dtype) if by_source else self.rows(chunk, dtype)
            local = part.indices - chunk.start if chunk.start else part.indices
            self._parts[key] = replace(part, indices=self._pattern.keep(local))
        return self._parts[key]

    def columns(
        self,
        chunk: Chunk,
        dtype: torch.dtype,
        scale: float = 1.0,
        done: StepOrder | None = None,
    ) -> SparseRows:
        """Return the chunk's columns as rows: the edges that start in it, by their targets.

        `scale` multiplies entries between different chunks. With `done` entries are zero whose
        target is in a chunk that awaits backward.
        """
        key = ("columns", chunk.start, chunk.end, dtype, scale)
        if key not in self._parts:
            pattern, values = self._pattern, self._in_order(dtype, by_source=True, scale=scale)
            starts, columns = pattern.starts_by_source, pattern.targets_by_source
            self._parts[key] = _cut(chunk, starts, columns, values)
        if done is None:
            return self._parts[key]
        made = key, done.number
        if self._masked is None or self._masked[0] != made:
            self._masked = made, self._mask(self._parts[key], done, chunk, dtype)
        return self._masked[1]

    def ghost_columns(
        self,
        chunk: Chunk,
        ghosts: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        done: StepOrder | None = None,
    ) -> SparseRows:
        """Return the columns of rows `ghosts`, the chunk's rows in other shards; see `columns`."""
        key = ("ghosts", chunk.index, chunk.is_whole, dtype, scale)
        if key not in self._parts:
            pattern, starts = self._pattern, self._pattern.starts_by_source
            counts = (starts[ghosts + 1] - starts[ghosts]).long()
            offsets = F.pad(counts.cumsum(0), (1, 0)).to(starts.dtype)
            first = (starts[ghosts] - offsets[:-1]).repeat_interleave(counts)
            entry = first + torch.arange(int(offsets[-1]), device=starts.device)
            values = self._in_order(dtype, by_source=True, scale=scale)
            values = None if values is None else values[entry]
            self._parts[key] = SparseRows(offsets, pattern.targets_by_source[entry], values)
        part = self._parts[key]
        return part if done is None else self._mask(part, done, chunk, dtype)

    def _in_order(self, dtype: torch.dtype, *, by_source: bool, scale: float) -> Tensor | None:
        key = (dtype, by_source, scale)
        if key not in self._typed:
            pattern, values = self._pattern, self._values
            if self._is_mean:
                degrees = pattern.starts.diff().clamp(min=1)
                share = pattern.by_target(degrees.to(torch.float64).reciprocal())
                values = share if values is None else share.mul_(values)
            if values is not None:
                values = values.to(dtype).contiguous()
                values = values.index_select(0, pattern.order) if by_source else values
            if scale != 1.0:
                is_cross = pattern.find_cross()
                factor = torch.ones(is_cross.numel(), dtype=dtype, device=is_cross.device)
                factor.masked_fill_(is_cross, scale)
                values = factor if values is None else factor.mul_(values)
            if values is not None and values is not self._values:
                values = self._pattern.keep(values)
            self._typed[key] = values
        return self._typed[key]

    def _mask(
        self, rows: SparseRows, done: StepOrder, chunk: Chunk, dtype: torch.dtype
    ) -> SparseRows:
        """Return columns of `chunk` with zeros for targets in chunks that await backward."""
        owner = self._pattern.chunk_of_row
        mask = done.has_run(chunk.index, torch.empty(0, dtype=dtype, device=owner.device))
        mask = mask[owner].index_select(0, rows.indices)
        return replace(rows, values=mask if rows.values is None else mask.mul_(rows.values))


def _cut(chunk: Chunk, starts: Tensor, indices: Tensor, values: Tensor | None) -> SparseRows:
    offsets = starts[chunk.start : chunk.end + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    values = None if values is None else values[first:last]
    return SparseRows(offsets - offsets[0], indices[first:last], values)


def multiply(rows: SparseRows, table: Tensor) -> Tensor:
    """Return `rows @ table`, `[num_rows, channels]`, without autocast.

    On CPU one thread adds the entries of a row in order, 5 to 8 times faster than torch's sparse
    matrices (`examples/benchmarks/aggregation`).
    """
    device, table = table.device.type, table.contiguous()
    sum_on_gpu = _gpu_kernel(table.device) if table.is_cuda else None
    if sum_on_gpu is not None:
        return sum_on_gpu(rows, table)
    is_cast = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if is_cast else nullcontext():
        result: Tensor = torch.embedding_bag(
            table, rows.indices, rows.offsets, False, 0, False, rows.values, True
        )[0]
    return result


@functools.cache
def _gpu_kernel(device: torch.device) -> Callable[[SparseRows, Tensor], Tensor] | None:
    """Return the kernel of GPUs, or None, with a warning, where it does not run."""
    try:
        from lightning_gnnpipe.passing.row_sums import sum_rows  # needs Triton and a C compiler

        numbers = torch.arange(2, device=device, dtype=torch.int32)
        one = sum_rows(SparseRows(numbers, numbers[:1], None), torch.ones(1, 1, device=device))
        assert one.item() == 1.0  # and wait: errors of a GPU come late
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", ()))):
            raise
        log.warning(
            "Triton's kernel does not run (%s: %s). Sums of rows take 4 to 8 times as long where "
            "nodes have many edges. Install triton and a C compiler.",
            type(error).__name__,
            first_line(error),
        )
        return None
    return sum_rows
