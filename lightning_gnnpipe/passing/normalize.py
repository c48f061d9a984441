"""Normalisation by degree, right on a chunk.

`gcn_norm` and `degree` look at all edges of a node, but a halo node's edges lie in another chunk.
Layers that call them in their own methods get versions that know the halo: without edge weights the
degrees are those of the whole graph, computed once; with edge weights (which may be learned) the
chunk's own degrees are pushed and the halo's are pulled, like any other node-level value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, degree, scatter

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing.context import MessageContext


@contextmanager
def localized(convs: Mapping[str, MessagePassing], context: MessageContext) -> Iterator[None]:
    """Let the methods of `convs` find functions that know the halo, within the block.

    The names are replaced in the modules that define the layers' classes, so that inherited
    methods, and `super().forward(...)`, find them as well.
    """
    norm, local_degree = _LocalNorm(context), _LocalDegree(context)
    with ExitStack() as stack:
        for names in _namespaces(convs):
            is_own = not str(names["__name__"]).startswith("torch_geometric.")
            if names.get("gcn_norm") is gcn_norm:
                stack.callback(names.__setitem__, "gcn_norm", gcn_norm)
                names["gcn_norm"] = norm
            # PyG's own layers call `degree` for the nodes they are about to update only.
            if is_own and names.get("degree") is degree:
                stack.callback(names.__setitem__, "degree", degree)
                names["degree"] = local_degree
        yield


def _namespaces(convs: Mapping[str, MessagePassing]) -> Iterator[dict[str, Any]]:
    """Yield the globals of the modules in which the layers' classes are defined."""
    seen: set[int] = set()
    for conv in convs.values():
        for cls in type(conv).__mro__[: type(conv).__mro__.index(MessagePassing)]:
            for function in vars(cls).values():
                if isinstance(function, FunctionType) and id(function.__globals__) not in seen:
                    seen.add(id(function.__globals__))
                    yield function.__globals__


class _LocalNorm:
    """`gcn_norm` for the edges of one chunk."""

    def __init__(self, context: MessageContext) -> None:
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
        """Return local edges, self-loops included, and their weights.

        They are those that PyG's function gives for the whole graph.
        """
        fill = 2.0 if improved else 1.0
        chunk = self.context.chunk
        if edge_weight is None and edge_index is not chunk.edge_index:
            # The model has changed the edges: their degrees are not those of the user's graph.
            return self._by_history(
                *_unweighted(edge_index, chunk.num_nodes, fill, add_self_loops, dtype)
            )
        if edge_weight is not None:
            edges, weight = _with_loops(
                edge_index, edge_weight, fill, chunk.num_nodes, add_self_loops
            )
            return self._by_history(edges, weight)
        key = (id(edge_index), fill, add_self_loops, dtype)
        if key not in self.context.norm_cache:
            self.context.norm_cache[key] = self._constant(edge_index, fill, add_self_loops, dtype)
        edges, norm = self.context.norm_cache[key]
        return edges, norm

    def _by_history(self, edges: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise by the chunk's own degrees, pushed, and those of its halo, pulled."""
        own = _inverse_root(edges, weight, self.context.chunk.num_nodes)
        call = self.context.next_call("gcn_norm")
        wide = self.context.widen("gcn_norm", call, "degree", own)
        return edges, wide[edges[0]] * weight * wide[edges[1]]

    def _constant(
        self, edge_index: Tensor, fill: float, add_self_loops: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        context, loops = self.context, (fill, add_self_loops, dtype)
        whole, key = context.whole, ("degree", *loops)
        if key not in context.norm_cache:
            edges, weight = _unweighted(whole.edge_index, whole.num_nodes, *loops)
            context.norm_cache[key] = (_inverse_root(edges, weight, whole.num_nodes),)
        wide = context.widen_constant(context.norm_cache[key][0])
        edges, weight = _unweighted(edge_index, context.chunk.num_nodes, *loops)
        return edges, wide[edges[0]] * weight * wide[edges[1]]


class _LocalDegree:
    """`degree` for the nodes of one chunk, followed by those of its halo."""

    def __init__(self, context: MessageContext) -> None:
        self.context = context

    def __call__(
        self, index: Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return `[num_nodes + num_halo]` degrees of the nodes; `index` is the edges' targets."""
        chunk = self.context.chunk
        if self.context.is_passing:
            return degree(index, num_nodes, dtype)
        if index.numel() and int(index.max()) >= chunk.num_nodes:
            raise UnsupportedError(
                explain(
                    expected="a layer to count the edges that end in a node",
                    found="degree() of the edges' sources",
                    remedy="Pass the degrees in as a node-level tensor, or train with "
                    "num_chunks=1.",
                )
            )
        own = degree(index, chunk.num_nodes, dtype)
        call = self.context.next_call("degree")
        return self.context.widen("degree", call, "degree", own)


def _with_loops(
    edge_index: Tensor, weight: Tensor, fill: float, num_nodes: int, add_self_loops: bool
) -> tuple[Tensor, Tensor]:
    if not add_self_loops:
        return edge_index, weight
    edges, weights = add_remaining_self_loops(edge_index, weight, fill, num_nodes)
    assert weights is not None
    return edges, weights


def _unweighted(
    edge_index: Tensor,
    num_nodes: int,
    fill: float,
    add_self_loops: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return edges of weight 1.

    PyG gives the loops it adds to them weight 1 as well, whatever `fill` is.
    """
    edges = edge_index
    if add_self_loops:
        edges, _ = add_remaining_self_loops(edge_index, None, fill, num_nodes)
    return edges, torch.ones(edges.size(1), dtype=dtype, device=edges.device)


def _inverse_root(edges: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """Return the degrees to the power of -1/2, `[num_nodes]`; 0 where a node has no edge."""
    total = scatter(weight, edges[1], dim=0, dim_size=num_nodes, reduce="sum")
    root = total.pow(-0.5)
    return root.masked_fill(root == float("inf"), 0.0)
