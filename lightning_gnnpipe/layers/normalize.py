"""Edge normalisation on a chunk: `gcn_norm`, Laplacians and self-loops.

They read all edges of a node, but a halo node's edges lie in another chunk: see `_of_the_batch`,
and for weights that the model computes `_by_degrees`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    get_laplacian,
    remove_self_loops,
    scatter,
    to_edge_index,
)

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import (
    Entries,
    InLayer,
    MessageContext,
    Replacement,
    is_matrix,
    replaces,
)
from lightning_gnnpipe.passing.edges import WHOLE


def localized(
    convs: Mapping[str, MessagePassing], context: MessageContext
) -> Iterator[Replacement]:
    """Yield replacements of PyG's normalisation functions by versions for one chunk.

    The names are replaced in the modules that define the layers' classes, so that inherited
    methods, and `super().forward(...)`, find them too. Other callers there get PyG's functions.
    """
    locals_: dict[Callable[..., Any], Callable[..., Any]] = {
        gcn_norm: partial(_local_norm, context),
        get_laplacian: partial(_local_laplacian, context),
        add_self_loops: partial(_loops, context, add_self_loops),
        add_remaining_self_loops: partial(_loops, context, add_remaining_self_loops),
        remove_self_loops: partial(_loops, context, remove_self_loops),
    }
    for names in _namespaces(convs):
        for function, local in locals_.items():
            name = function.__name__
            if replaces(names.get(name), function):
                yield names, {name: InLayer(context, local, names[name])}
    for conv in convs.values():
        if hasattr(conv, "__norm__"):  # ChebConv
            yield conv, {"__norm__": partial(_local_rescaled, context, conv.__norm__)}


def _namespaces(convs: Mapping[str, MessagePassing]) -> Iterator[dict[str, Any]]:
    """Yield the globals of the modules that define the layers' classes."""
    seen: set[int] = set()
    for conv in convs.values():
        for cls in type(conv).__mro__[: type(conv).__mro__.index(MessagePassing)]:
            for function in vars(cls).values():
                if isinstance(function, FunctionType) and id(function.__globals__) not in seen:
                    seen.add(id(function.__globals__))
                    yield function.__globals__


def _of_the_batch(
    context: MessageContext,
    key: Hashable,
    edge_index: Tensor,
    weight: Tensor | None,
    function: Callable[[Tensor, Tensor | None], Any],
) -> tuple[Tensor, Tensor] | None:
    """Return the chunk's part of `function` on the whole graph; None if inputs are computed."""
    at = context.at
    if edge_index is not at.chunk.edge_index:
        return None
    if weight is not None:
        key = key, context.leaf_name(weight)
    part = at.parts.get(key)
    if part is None or part.weight is not weight:
        whole, edges = context.whole_leaf(weight), at.whole.edge_index
        if weight is not None and whole is None:
            return None
        if part is None or part.of.source is not whole:  # a copy beside code in place is no news
            part = context.edges.part(at, key, weight, whole, lambda: function(edges, whole))
            at.parts[key] = part
    return part.edges, part.values


def _local_norm(
    context: MessageContext,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`gcn_norm` for one chunk: local edges with self-loops, and the whole graph's weights."""
    entries = context.entries_of(edge_index) if context.chooses_edges else None
    if entries is not None:
        return _local_matrix_norm(context, entries, improved, add_self_loops, flow, dtype)
    is_counted, num_nodes = num_nodes is None, context.at.chunk.num_nodes
    options = (improved, add_self_loops, flow, dtype)
    is_made = edge_index is not context.at.chunk.edge_index and is_matrix(edge_index)
    if flow != "source_to_target" or is_made:  # called by the model, or with edges that it changed
        if not context.sees_all:
            raise UnsupportedError(
                expected="edges of the batch, normalised for flow='source_to_target'",
                found=f"flow='{flow}', or a matrix made in forward, on a part of the graph",
                remedy="Pass normalised edge weights to forward, or train with num_chunks=1 "
                "and graph_parallel=1.",
            )
        return gcn_norm(edge_index, edge_weight, num_nodes, *options)

    def normalise(edges: Tensor, weight: Tensor | None) -> Any:
        found = gcn_norm(edges, weight, context.at.whole.num_nodes, *options)
        return _counted(context.at.all_numbered, *found) if is_counted and add_self_loops else found

    key = ("gcn_norm", is_counted, *options)
    known = _of_the_batch(context, key, edge_index, edge_weight, normalise)
    if known is not None:
        return known
    if add_self_loops:
        # Without weights PyG gives self-loops weight 1, even if `improved`.
        loop = 2.0 if improved and edge_weight is not None else 1.0
        edge_index, edge_weight = add_remaining_self_loops(edge_index, edge_weight, loop, num_nodes)
        if is_counted:
            edge_index, edge_weight = _counted(context.at.are_numbered, edge_index, edge_weight)
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    return edge_index, _by_degrees(context, edge_index, edge_weight)


def _by_degrees(context: MessageContext, edge_index: Tensor, weight: Tensor) -> Tensor:
    """Return normalised weights: push the chunk's degrees to the power of -1/2, pull the halo's."""
    source, target = edge_index
    root = scatter(weight, target, 0, context.at.chunk.num_nodes, reduce="sum").pow(-0.5)
    own = root.masked_fill(root == float("inf"), 0.0)
    wide = context.widen("gcn_norm", next(context.calls["gcn_norm"]), "degree", own)
    return wide[source] * weight * wide[target]


def _local_matrix_norm(
    context: MessageContext,
    entries: Entries,
    improved: bool,
    adds_loops: bool,
    flow: str,
    dtype: torch.dtype | None,
) -> Any:
    """`gcn_norm` of a sparse matrix, which treats self-loops otherwise, for one chunk."""
    options = (improved, adds_loops, flow, dtype)

    def normalise(edges: Tensor, weight: Tensor | None) -> Any:
        num_nodes = context.at.whole.num_nodes
        matrix = replace(entries, edges=edges, weight=weight).build(num_nodes, num_nodes)
        found = gcn_norm(matrix, None, num_nodes, *options)
        index, values = to_edge_index(found[0] if isinstance(found, tuple) else found)
        return index.flip(0), values

    edges, weight = entries.edges, entries.weight
    key = ("gcn_norm", *options, entries.layout, entries.dtype)
    known = _of_the_batch(context, key, edges, weight, normalise)
    if known is None:
        assert weight is not None
        if adds_loops:
            loop, num_nodes = 2.0 if improved else 1.0, context.at.chunk.num_nodes
            edges, weight = add_self_loops(edges, weight, loop, num_nodes)
        known = edges, _by_degrees(context, edges, weight)
    matrix = context.as_matrix(replace(entries, edges=known[0], weight=known[1]))
    return matrix if entries.layout is None else (matrix, None)


def _local_laplacian(
    context: MessageContext,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    normalization: str | None = None,
    dtype: torch.dtype | None = None,
    num_nodes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`get_laplacian` for one chunk: local edges with self-loops, and weights."""

    def compute(edges: Tensor, weight: Tensor | None) -> Any:
        size = context.at.whole.num_nodes
        found = get_laplacian(edges, weight, normalization, dtype, size)
        return _counted(context.at.all_numbered, *found) if num_nodes is None else found

    key = ("get_laplacian", normalization, dtype, num_nodes is None)
    known = _of_the_batch(context, key, edge_index, edge_weight, compute)
    is_all = edge_index is context.at.whole.edge_index  # as `_local_rescaled` passes them
    if known is None and not (is_all or context.sees_all):
        raise _refuse_laplacian()
    return known or get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)


def _local_rescaled(
    context: MessageContext,
    original: Callable[..., Any],
    edge_index: Tensor,
    num_nodes: int | None,
    edge_weight: Tensor | None,
    normalization: str | None,
    lambda_max: Any = None,
    dtype: torch.dtype | None = None,
    batch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ChebConv's rescaled Laplacian for one chunk: local edges with self-loops, and weights."""
    options = (normalization, lambda_max, dtype)

    def compute(edges: Tensor, weight: Tensor | None) -> Any:
        return original(edges, context.at.whole.num_nodes, weight, *options)

    known = None
    if batch is None and not isinstance(lambda_max, Tensor):
        key = ("laplacian", *options)
        known = _of_the_batch(context, key, edge_index, edge_weight, compute)
    if known is None and not context.sees_all:
        raise _refuse_laplacian()
    return known or original(edge_index, num_nodes, edge_weight, *options, batch)


def _refuse_laplacian() -> UnsupportedError:
    return UnsupportedError(
        expected="a Laplacian of the batch's own edges and edge weights",
        found="edges or weights that the model computes, a 'batch', or a tensor lambda_max",
        remedy="Pass edge weights to forward that need no gradient, and lambda_max as a "
        "number, or train with num_chunks=1.",
    )


def _loops(
    context: MessageContext,
    function: Callable[..., Any],
    edge_index: Tensor,
    edge_attr: Any = None,
    *options: Any,
    **named: Any,
) -> tuple[Tensor, Any]:
    """Add or remove a chunk's self-loops; without edge features, keep the result for all steps."""
    local = function
    if function is not remove_self_loops:
        local = partial(_local_loops, context, function)
    given, known = (*options, *named.items()), None
    if edge_attr is None and context.at.place != WHOLE:
        known = context.at.results.get(id(edge_index))
    is_varied = isinstance(named.get("fill_value"), Tensor)
    if known is None or known[0] is not edge_index or is_varied:
        return local(edge_index, edge_attr, *options, **named)
    results = known[1]
    if (function, given) not in results:
        with torch.inference_mode(False):
            edges, _ = local(edge_index, None, *options, **named)
            results[function, given] = context.edges.keep(edges), None
        context.at.keep_results_of(results[function, given][0])
    return results[function, given]


def _local_loops(
    context: MessageContext,
    original: Callable[..., Any],
    edge_index: Tensor,
    edge_attr: Any = None,
    fill_value: Any = None,
    num_nodes: Any = None,
) -> tuple[Tensor, Any]:
    """Self-loops for the nodes of one chunk, if a layer does not pass `num_nodes`."""
    if num_nodes is not None or is_matrix(edge_index):
        return original(edge_index, edge_attr, fill_value, num_nodes)
    if context.at.edge_set is None:
        raise UnsupportedError(
            expected=f"a layer on several edge sets to pass 'num_nodes' to {original.__name__}()",
            found="none",
            remedy="Pass num_nodes=x.size(0).",
        )
    num_nodes = context.at.chunk.num_nodes
    return _counted(
        context.at.are_numbered, *original(edge_index, edge_attr, fill_value, num_nodes)
    )


def _counted(numbered: Tensor, edges: Tensor, values: Tensor | None) -> tuple[Tensor, Any]:
    """Drop loops, which come last, of nodes that PyG does not count: beyond the largest index."""
    keep = torch.ones(edges.size(1), dtype=torch.bool, device=edges.device)
    keep[edges.size(1) - numbered.numel() :] = numbered
    return edges[:, keep], None if values is None else values[keep]
