"""Products of some rows of a sparse matrix with a dense table.

Which of torch's routes is fastest depends on the device and the dtype. On CPU bags of an embedding
are, by 5 to 8 times (`examples/benchmarks/aggregation`); elsewhere it is found by timing each of
them once on a product of real size.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_gnnpipe.passing.adjacency import Adjacency, SparseRows
from lightning_gnnpipe.types import ChunkView

Kernel = Callable[[SparseRows, Tensor], Tensor]

_MIN_WORK = 1 << 20  # multiply-adds below which a timing says nothing
_REPEATS = 3


def multiply(rows: SparseRows, table: Tensor) -> Tensor:
    """Return `[num_rows, channels]`: the rows times `table`, `[num_columns, channels]`."""
    if not torch.is_autocast_enabled(table.device.type):
        return _choose(rows, table)(rows, table)
    with torch.autocast(table.device.type, enabled=False):
        return _choose(rows, table)(rows, table)


def entry_sums(
    adjacency: Adjacency, chunk: ChunkView, sources: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return `[num_nodes_of_chunk]`: the sum of a row's entries in the columns of some chunks.

    The last sums of each chunk are kept, for all layers with the same edges and weights.

    Args:
        adjacency: The edges and their weights.
        chunk: The chunk whose rows they are.
        sources: The chunks whose columns count.
        dtype: Of the sums.
    """
    known = adjacency.sums.get((chunk.index, dtype))
    if known is None or known[0] != sources:
        counts = adjacency.rows_of(sources, dtype)
        known = sources, multiply(adjacency.rows(chunk, dtype), counts).squeeze(1)
        adjacency.sums[chunk.index, dtype] = known
    return known[1]


def _choose(rows: SparseRows, table: Tensor) -> Kernel:
    key = (table.device.type, table.dtype)
    if table.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return _bag
    if key not in _chosen:
        if rows.indices.numel() * table.size(1) < _MIN_WORK:
            return _bag
        _chosen[key] = _fastest(rows, table)
    return _chosen[key]


def _bag(rows: SparseRows, table: Tensor) -> Tensor:
    """Sum rows of the table as bags of an embedding: at the memory's bandwidth on CPU."""
    result: Tensor = torch.embedding_bag(
        table.contiguous(), rows.indices, rows.offsets, False, 0, False, rows.values, True
    )[0]
    return result


def _csr(rows: SparseRows, table: Tensor) -> Tensor:
    """Multiply by torch's sparse matrix."""
    values = rows.values
    if values is None:
        values = torch.ones(rows.indices.numel(), dtype=table.dtype, device=table.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
        matrix = torch.sparse_csr_tensor(
            rows.offsets,
            rows.indices,
            values,
            size=(rows.offsets.numel() - 1, table.size(0)),
            check_invariants=False,
        )
        return matrix @ table


_KERNELS: tuple[Kernel, ...] = (_bag, _csr)
_chosen: dict[tuple[str, torch.dtype], Kernel] = {}


def _fastest(rows: SparseRows, table: Tensor) -> Kernel:
    times = {}
    for kernel in _KERNELS:
        try:
            kernel(rows, table)
            times[kernel] = min(_time(kernel, rows, table) for _ in range(_REPEATS))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # not implemented for this dtype or device
            continue
    return min(times, key=lambda kernel: times[kernel], default=_bag)


def _time(kernel: Kernel, rows: SparseRows, table: Tensor) -> float:
    _synchronize(table)
    start = time.perf_counter()
    kernel(rows, table)
    _synchronize(table)
    return time.perf_counter() - start


def _synchronize(table: Tensor) -> None:
    if table.is_cuda:
        torch.cuda.synchronize(table.device)
