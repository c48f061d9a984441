"""What forward reads by the sources of edges, outside of `propagate`, in the user's own code.

    row, col = edge_index
    scatter(x[row], col, 0, x.size(0))    messages by hand: x is widened first
    weight = (x[row] * x[col]).sum(-1)    weights of edges: likewise
    degree(row, x.size(0))                comes from the whole graph

Targets lie in the chunk, some sources do not.
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
_FOLLOWED = ("__getitem__", "unbind", "cat", "view", "expand", "expand_as", "unsqueeze")
_HELPERS = "torch_geometric.utils."
_LIBRARIES = ("torch.", "torch_geometric.nn.conv.", "lightning_gnnpipe.")


class Lookups(BaseTorchFunctionMode):
    """Widens rows that the user's code looks up by sources, within the block.

    Args:
        num_nodes: Number of rows before they are widened.
        widen: Appends the halo's rows.
        sum_up: Sums values of edges at their sources, of which it is given the numbers, the rows
            to add to, and whether to count edges; None lets torch do it.
        pairs: Tensors that look like edges and are none.
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

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        rows, index = _lookup(name, args, kwargs)
        if id(index) in self._sources and rows.size(0) == self._num_nodes:
            caller = _caller()
            is_sum, is_users = name.startswith(_SUMS), _is_users(caller)
            if is_users and not is_sum:
                args = (self._widen(rows), *args[1:])
            elif is_users and caller is not None:
                summed = self._sum_up(index, rows, caller.f_code is degree.__code__)
                if summed is not None:
                    return summed
        # Warnings of torch then name torch's file, not this one.
        result = cast(Any, super()).__torch_function__(function, types, args, kwargs)
        self._follow(name, args, result)
        return result

    def _follow(self, name: str, args: Any, result: Any) -> None:
        """Keep `result` in mind if it holds sources: row 0 of edges, or some of them."""
        if not args or name not in _FOLLOWED:
            return
        given, key = args[0], args[1] if len(args) > 1 else 0
        found = None
        if name == "cat":
            found = result if any(id(one) in self._sources for one in given) else None
        elif _is_edges(given) and not any(given is pair for pair in self._pairs):
            first = key[0] if isinstance(key, tuple) else key
            is_first = type(first) is int and first == 0
            if name in ("__getitem__", "unbind"):
                found = result[0] if name == "unbind" else result if is_first else None
        elif id(given) in self._sources:
            found = result
        if found is not None:
            self._sources[id(found)] = found


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
                remedy="Pass the edges to forward as edge_index.flip(0) and swap the two rows "
                "there, or train with num_chunks=1. Pass degrees as a node-level tensor.",
            )

        def compute() -> tuple[Tensor, Tensor]:
            nodes = torch.arange(whole.num_nodes, device=own.device).expand(2, -1)
            return nodes, degree(whole.edge_index[0], whole.num_nodes, rows.dtype)

        key = ("degree", context.edges_key, rows.dtype)
        return context.functions.part(key, None, chunk, compute)[1]

    return Lookups(chunk.num_nodes, widen, sum_up)


def _lookup(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the rows and the index of a lookup, or sum, in dimension 0; Nones for all else."""
    if name == "__getitem__":
        rows, index = args
        index = index[0] if isinstance(index, tuple) and index else index
        return rows, index
    if name.startswith(_SUMS) and len(args) > 2:
        return args[0], args[2]
    if name == "index_select" and args:
        named = dict(zip(("dim", "index"), args[1:], strict=False)) | kwargs
        if named.get("dim") == 0:
            return args[0], named.get("index")
    return None, None


def _is_edges(value: Any) -> bool:
    is_index = isinstance(value, Tensor) and value.dtype == torch.int64
    return is_index and value.dim() == 2 and value.size(0) == 2


def _caller() -> FrameType | None:
    """Return the frame that calls a function of torch, from `__torch_function__`."""
    frame = currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    return frame


def _is_users(caller: FrameType | None) -> bool:
    """Whether the user's code, a traced forward or a model of PyG calls, maybe by PyG's helpers."""
    while caller is not None and (
        caller.f_code is gcn_norm.__code__ or _module_of(caller).startswith(_HELPERS)
    ):
        caller = caller.f_back
    name = _module_of(caller)
    return name.startswith("torch.fx.") or not f"{name}.".startswith(_LIBRARIES)


def _module_of(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))
