"""Sparse matrices as arguments of the pipelined module.

Row i of `A @ x` sums rows of x: columns are sources of edges, rows are targets. On the whole graph
and on samples the matrix is put together again in the user's layout, so that PyG's own code runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import to_edge_index

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import starts_of

if TYPE_CHECKING:
    from lightning_gnnpipe.passing.context import MessageContext

# The context of the running chunk, per thread; None on the whole graph without one.
RUNNING: ContextVar[MessageContext | None] = ContextVar("running", default=None)

_LAYOUTS = (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc)
_NUM_SAMPLED = 1024


def is_matrix(value: object) -> bool:
    """Whether `value` is a sparse matrix: a tensor, or torch-sparse's `SparseTensor`."""
    if WITH_TORCH_SPARSE and isinstance(value, SparseTensor):
        return True
    return isinstance(value, Tensor) and value.layout in _LAYOUTS


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The entries of a sparse matrix."""

    edges: Tensor  # `[2, num_edges]` columns and rows
    weight: Tensor | None  # `[num_edges, *]` values; None for ones
    layout: torch.layout | None  # None for `SparseTensor`
    dtype: torch.dtype | None  # of the values; None for a `SparseTensor` without values

    def build(self, num_rows: int, num_columns: int) -> Any:
        """Return the matrix; entries of a row stay in their order."""
        (column, row), values = self.edges, self.weight
        major = column if self.layout is torch.sparse_csc else row
        if bool((major[1:] < major[:-1]).any()):
            order = major.argsort(stable=True)
            column, row = column[order], row[order]
            values = None if values is None else values[order]
        if values is None and self.dtype is not None:
            values = torch.ones(row.numel(), dtype=self.dtype, device=row.device)
        sizes = (num_rows, num_columns)
        if self.layout is None:
            return SparseTensor(row=row, col=column, value=values, sparse_sizes=sizes)
        assert values is not None
        shape = (*sizes, *values.shape[1:])
        if self.layout is torch.sparse_coo:
            places = torch.stack([row, column])
            return torch.sparse_coo_tensor(places, values, shape, is_coalesced=True)
        if self.layout is torch.sparse_csc:
            return torch.sparse_csc_tensor(starts_of(column, num_columns), row, values, shape)
        return torch.sparse_csr_tensor(starts_of(row, num_rows), column, values, shape)


class Matrices:
    """The entries of matrices that were arguments before: the same tensors in each step."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def take_apart(self, name: str, matrix: Any) -> tuple[Entries, Tensor]:
        """Return the entries of argument `name`, and a tensor `[num_nodes, 0]`."""
        num_rows, num_columns = matrix.size(0), matrix.size(1)
        if num_rows != num_columns:
            raise refuse_shape(name, f"{num_rows} rows and {num_columns} columns")
        known = self._known.get(id(matrix))
        if known is not None and known.is_of(matrix):
            return known.entries, known.nodes
        with torch.inference_mode(False):
            known = _Known(matrix)
        if not known.values.requires_grad:
            self._known[id(matrix)] = known
            weakref.finalize(matrix, self._known.pop, id(matrix), None)
        return known.entries, known.nodes


def refuse_shape(name: str, found: str) -> UnsupportedError:
    """Return the error for a matrix `name` that is not over the nodes."""
    return UnsupportedError(
        expected=f"the sparse matrix '{name}' to have one row and one column for each node",
        found=found,
        remedy="Pass features as a dense tensor (x.to_dense()), and one matrix over all nodes.",
    )


class _Known:
    """Entries of a matrix; `nodes`: `[num_nodes, 0]`."""

    def __init__(self, matrix: Any) -> None:
        self._matrix, self._version = weakref.ref(matrix), _version_of(matrix)
        layout = matrix.layout if isinstance(matrix, Tensor) else None
        if layout is torch.sparse_coo:
            matrix = matrix.coalesce()
            (row, column), self.values = matrix.indices(), matrix.values()
        else:
            (row, column), self.values = to_edge_index(matrix)
        is_plain = self.values.dim() == 1 and not self.values.requires_grad
        weight = None if is_plain and bool((self.values == 1).all()) else self.values
        dtype = self.values.dtype if layout is not None or matrix.has_value() else None
        self.entries = Entries(torch.stack([column, row]), weight, layout, dtype)
        self.nodes = row.new_empty((matrix.size(0), 0))

    def is_of(self, matrix: Any) -> bool:
        """Whether these are the entries of `matrix` as it is now."""
        if self._matrix() is not matrix or self._version != _version_of(matrix):
            return False
        some = self.values[:: max(self.values.size(0) // _NUM_SAMPLED, 1)]
        return self.entries.weight is not None or bool((some == 1).all())


def _version_of(matrix: Any) -> int:
    return version_of(matrix) if isinstance(matrix, Tensor) else 0


class ChunkMatrix:
    """Replaces a sparse matrix in the running chunk: the rows of the chunk's nodes.

    A layer receives them as a matrix `[num_nodes, num_nodes + num_halo]`; see `as_matrix`.
    """

    def __init__(self, context: MessageContext, entries: Entries) -> None:
        self._context, self._entries = context, entries
        context.chooses_edges = True

    @contextmanager
    def along(self) -> Iterator[Entries]:
        """Switch to the matrix's edges within the block; yield the chunk's entries."""
        context, entries = self._context, self._entries
        assert context.find(entries.edges) is not None
        with context.along(entries.edges):
            yield entries


def assemble(
    edges: Tensor,
    weight: Tensor | None,
    nodes: Tensor,
    layout: torch.layout | None,
    dtype: torch.dtype | None,
) -> Any:
    """Return the matrix of these parts; see `Matrices.take_apart`. On a chunk, a `ChunkMatrix`."""
    context, entries = RUNNING.get(), Entries(edges, weight, layout, dtype)
    if context is not None:
        return ChunkMatrix(context, entries)
    return entries.build(nodes.size(0), nodes.size(0))


def turn_edges(edges: Tensor) -> Tensor:
    """Replace `edge_index.flip(0)` in forward; see `MessageContext.turn`."""
    context = RUNNING.get()
    return edges.flip(0) if context is None else context.turn(edges)
