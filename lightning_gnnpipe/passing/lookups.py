"""Rows that the user's code looks up at the sources of edges, outside of `propagate`.

In `x[row]`, x is widened first: some sources are rows of other chunks. `degree(row, x.size(0))`
comes from the whole graph. All targets are rows of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import currentframe
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree

from lightning_gnnpipe.errors import UnsupportedError

if TYPE_CHECKING:
    from lightning_gnnpipe.passing.context import MessageContext

_SUMS = ("scatter_", "index_add", "index_reduce")
_FOLLOWED = ("__getitem__", "cat", "clone", "view", "expand", "expand_as", "unsqueeze")
_BY_DIM = ("index_select", "gather")
_HELPERS = ("torch_geometric.utils.", "torch.overrides", "torch.nn.functional")
_LIBRARIES = ("torch.", "torch_geometric.nn.conv.", "lightning_gnnpipe.")


class Lookups(BaseTorchFunctionMode):
    """Appends halo rows where the user's code looks up rows of nodes by sources, within the block.

    `sum_up(sources, rows, counts)` returns a sum at sources, or None to let torch compute it.
    `counts` is True for `degree`. `pairs`: tensors of shape `[2, n]` that are no edges.
    """

    def __init__(
        self,
        num_nodes: int,
        widen: Callable[[Tensor], Tensor],
        sum_up: Callable[[Tensor, Tensor, bool], Tensor | None],
        pairs: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._num_nodes, self._widen, self._sum_up, self._pairs = num_nodes, widen, sum_up, pairs
        self._sources: dict[int, Tensor] = {}  # kept alive, so that no id is reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        rows, index = _lookup(name, args, kwargs)
        is_sum = name.startswith(_SUMS)
        reads = id(index) in self._sources or (not is_sum and self._is_edges(index))
        if reads and rows.size(0) == self._num_nodes:
            caller = _caller()
            is_users = _is_users(caller)
            if is_users and not is_sum:
                args = tuple(self._widen(rows) if one is rows else one for one in args)
            elif is_users and caller is not None:
                summed = self._sum_up(index, rows, caller.f_code is degree.__code__)
                if summed is not None:
                    return summed
        # Warnings of torch then name torch's file, not this one.
        result = cast(Any, super()).__torch_function__(func, types, args, kwargs)
        self._follow(name, args, result)
        return result

    def _follow(self, name: str, args: Any, result: Any) -> None:
        """Keep `result` in mind if it holds sources: row 0 of edges, or some of them."""
        if not args:
            return
        given, found = args[0], None
        if self._is_edges(given):
            parts = result if isinstance(result, list | tuple) else [result]
            found = next((one for one in parts if _is_first_row(one, given)), None)
            if name == "__getitem__" and isinstance(args[1], tuple) and args[1][0] == 0:
                found = result  # some of them
        elif name in _FOLLOWED:
            several = given if name == "cat" else [given]
            found = result if any(id(one) in self._sources for one in several) else None
        if found is not None:
            self._sources[id(found)] = found

    def _is_edges(self, value: Any) -> bool:
        is_index = isinstance(value, Tensor) and value.dtype == torch.int64
        is_alike = is_index and value.dim() == 2 and value.size(0) == 2
        return is_alike and not any(value is pair for pair in self._pairs)


def lookups_of(context: MessageContext) -> Lookups:
    """Return the lookups in the running chunk of `context`."""
    chunk, whole = context.chunk, context.whole

    @context.in_layer()
    def widen(rows: Tensor) -> Tensor:
        if context.is_passing:  # the layer's arguments are wide
            return rows
        given = rows if rows.is_floating_point() else rows.long()
        return context.widen("lookup", context.next_call("lookup"), "rows", given).to(rows.dtype)

    @context.in_layer()
    def sum_up(sources: Tensor, rows: Tensor, counts: bool) -> Tensor | None:
        if context.is_passing or context.sees_all:
            return None
        own = chunk.edge_index[0]
        if not counts or (sources.data_ptr(), sources.shape) != (own.data_ptr(), own.shape):
            raise UnsupportedError(
                expected="messages to be summed at the targets of edges, edge_index[1]",
                found="a sum at the sources, edge_index[0]",
                remedy="Pass edge_index.flip(0) to forward and write 'col, row = edge_index' "
                "there, or train with num_chunks=1. Pass degrees as a node-level tensor.",
            )

        def compute() -> tuple[Tensor, Tensor]:
            nodes = torch.arange(whole.num_nodes, device=own.device).expand(2, -1)
            return nodes, degree(whole.edge_index[0], whole.num_nodes, rows.dtype)

        key = ("degree", context.edges_key, rows.dtype)
        return context.functions.part(key, None, chunk, compute)[1]

    return Lookups(chunk.num_nodes, widen, sum_up)


def _lookup(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the rows and the index of a lookup, or sum, of rows; Nones for all else."""
    if name == "__getitem__":
        rows, index = args
        index = index[0] if isinstance(index, tuple) and index else index
        return rows, index
    if name.startswith(_SUMS) and len(args) > 2:
        return args[0], args[2]
    if name in _BY_DIM and len(args) > 1:
        named = dict(zip(("dim", "index"), args[1:], strict=False)) | kwargs
        if named.get("dim") in (0, -args[0].dim()):
            return args[0], named.get("index")
    if name == "embedding" and len(args) > 1:  # torch's has the rows first
        return (args[0], args[1]) if args[0].is_floating_point() else (args[1], args[0])
    return None, None


def _is_first_row(value: Any, edges: Tensor) -> bool:
    """Whether `value` is row 0 of `edges`, of any shape."""
    is_alike = isinstance(value, Tensor) and value.numel() == edges.size(1) > 0
    return is_alike and value.data_ptr() == edges.data_ptr()


def _caller() -> FrameType | None:
    """Return the frame that calls a function of torch, from `__torch_function__`."""
    frame = currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    return frame


def _is_users(caller: FrameType | None) -> bool:
    """Whether the call is the user's, a traced forward's or a PyG model's, maybe by a helper."""
    while caller is not None and (
        caller.f_code is gcn_norm.__code__ or _module_of(caller).startswith(_HELPERS)
    ):
        caller = caller.f_back
    name = _module_of(caller)
    return name.startswith("torch.fx.") or not f"{name}.".startswith(_LIBRARIES)


def _module_of(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))
