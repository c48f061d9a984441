"""Normalisation by degree, right on a chunk.

`gcn_norm` and `degree` look at all edges of a node, but a halo node's edges lie in another chunk. Layers that call
them in their own methods get versions that know the halo: without edge weights the degrees are those of the whole
graph, computed once; with edge weights (which may be learned) the chunk's own degrees are pushed and the halo's are
pulled, like any other node-level value.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.utils
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, degree, scatter

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing.context import MessageContext

_MESSAGE_METHODS = {"message", "aggregate", "update", "edge_update", "message_and_aggregate"}


def localized_methods(
    name: str, conv: MessagePassing, context: MessageContext
) -> dict[str, Callable[..., Any]]:
    """Return the methods of `conv` that normalise by degree, bound to functions that know the halo."""
    replacements: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "gcn_norm": (gcn_norm, _LocalNorm(name, context)),
        "degree": (degree, _LocalDegree(name, context)),
    }
    methods: dict[str, Callable[..., Any]] = {}
    for cls in reversed(type(conv).__mro__[: type(conv).__mro__.index(MessagePassing)]):
        for method, function in vars(cls).items():
            if not isinstance(function, types.FunctionType) or method in _MESSAGE_METHODS:
                continue
            found = {
                key: local
                for key, (original, local) in replacements.items()
                if key in function.__code__.co_names and function.__globals__.get(key) is original
            }
            if found:
                methods[method] = types.MethodType(_with_globals(function, found), conv)
            else:
                methods.pop(method, None)
    return methods


def _with_globals(
    function: types.FunctionType, found: dict[str, Callable[..., Any]]
) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **found},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _LocalNorm:
    """`gcn_norm` for the edges of one chunk."""

    def __init__(self, name: str, context: MessageContext) -> None:
        self.name = name
        self.context = context

    def __call__(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return local edges (self-loops included) and their weights, as PyG's function does for the whole graph."""
        fill = 2.0 if improved else 1.0
        chunk = self.context.chunk
        if edge_weight is not None:
            edges, weight = _with_loops(
                edge_index, edge_weight, fill, chunk.num_nodes, add_self_loops
            )
            own = _inverse_root(edges, weight, chunk.num_nodes)
            call = self.context.next_call(f"{self.name}.gcn_norm")
            wide = self.context.widen(f"{self.name}.gcn_norm", call, "degree", own)
            return edges, wide[edges[0]] * weight * wide[edges[1]]
        if edge_index is not chunk.edge_index:
            return self._constant(edge_index, fill, add_self_loops, dtype)
        key = (id(edge_index), fill, add_self_loops, dtype)
        if key not in self.context.norm_cache:
            self.context.norm_cache[key] = self._constant(edge_index, fill, add_self_loops, dtype)
        edges, norm = self.context.norm_cache[key]
        return edges, norm

    def _constant(
        self, edge_index: Tensor, fill: float, add_self_loops: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        whole, key = self.context.whole, ("degree", fill, add_self_loops, dtype)
        if key not in self.context.norm_cache:
            ones = torch.ones(whole.edge_index.size(1), dtype=dtype, device=edge_index.device)
            edges, weight = _with_loops(
                whole.edge_index, ones, fill, whole.num_nodes, add_self_loops
            )
            self.context.norm_cache[key] = (_inverse_root(edges, weight, whole.num_nodes),)
        wide = self.context.widen_constant(self.context.norm_cache[key][0])
        ones = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        edges, weight = _with_loops(
            edge_index, ones, fill, self.context.chunk.num_nodes, add_self_loops
        )
        return edges, wide[edges[0]] * weight * wide[edges[1]]


class _LocalDegree:
    """`degree` for the nodes of one chunk, followed by those of its halo."""

    def __init__(self, name: str, context: MessageContext) -> None:
        self.name = name
        self.context = context

    def __call__(
        self, index: Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return `[num_nodes + num_halo]` degrees of the nodes that `index`, the edges' targets, names."""
        chunk = self.context.chunk
        if index.numel() and int(index.max()) >= chunk.num_nodes:
            raise UnsupportedError(
                explain(
                    expected=f"layer '{self.name}' to count the edges that end in a node",
                    found="degree() of the edges' sources",
                    remedy="Pass the degrees in as a node-level tensor, or train with num_chunks=1.",
                )
            )
        own = torch_geometric.utils.degree(index, chunk.num_nodes, dtype)
        call = self.context.next_call(f"{self.name}.degree")
        return self.context.widen(f"{self.name}.degree", call, "degree", own)


def _with_loops(
    edge_index: Tensor, weight: Tensor, fill: float, num_nodes: int, add_self_loops: bool
) -> tuple[Tensor, Tensor]:
    if not add_self_loops:
        return edge_index, weight
    edges, weights = add_remaining_self_loops(edge_index, weight, fill, num_nodes)
    assert weights is not None
    return edges, weights


def _inverse_root(edges: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """Return the degrees to the power of -1/2, `[num_nodes]`; 0 where a node has no edge."""
    total = scatter(weight, edges[1], dim=0, dim_size=num_nodes, reduce="sum")
    root = total.pow(-0.5)
    return root.masked_fill(root == float("inf"), 0.0)
