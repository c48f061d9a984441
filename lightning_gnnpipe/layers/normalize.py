"""Edge normalisation on a chunk: `gcn_norm`, Laplacians and self-loops.

They read all edges of a node, but a halo node's edges lie in another chunk. For edges and weights
of the batch the result is computed once, on the whole graph. For weights that the model computes,
the chunk's degrees are pushed and the halo's are pulled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    get_laplacian,
    scatter,
    to_edge_index,
)

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import (
    Entries,
    InLayer,
    MessageContext,
    is_matrix,
    replace_attributes,
    replaces,
)

_LOOPS: tuple[Callable[..., Any], ...] = (add_remaining_self_loops, add_self_loops)


@contextmanager
def localized(convs: Mapping[str, MessagePassing], context: MessageContext) -> Iterator[None]:
    """Replace these functions for `convs` by versions for one chunk, within the block.

    The names are replaced in the modules that define the layers' classes, so that inherited
    methods, and `super().forward(...)`, find them too. Other callers there get PyG's functions.
    """
    locals_: dict[Callable[..., Any], Callable[..., Any]] = {
        gcn_norm: partial(_local_norm, context),
        get_laplacian: partial(_local_laplacian, context),
        **{function: partial(_local_loops, context, function) for function in _LOOPS},
    }
    with ExitStack() as stack:
        for names in _namespaces(convs):
            for function, local in locals_.items():
                name = function.__name__
                if replaces(names.get(name), function):
                    stack.callback(names.__setitem__, name, names[name])
                    names[name] = InLayer(context, local, names[name])
        for conv in convs.values():
            if hasattr(conv, "__norm__"):  # ChebConv
                laplacian = partial(_local_rescaled, context, conv.__norm__)
                stack.enter_context(replace_attributes(conv, {"__norm__": laplacian}))
        yield


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
    function: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor] | None:
    """Return the chunk's part of `function` on the whole graph; None if inputs are computed."""
    if edge_index is not context.chunk.edge_index:
        return None
    whole = None if weight is None else context.whole_leaf(weight)
    if weight is not None and whole is None:
        return None

    def compute() -> tuple[Tensor, Tensor]:
        return function(context.whole.edge_index, whole)

    return context.functions.part(
        (key, context.edges_key, None if weight is None else context.leaf_name(weight)),
        whole,
        context.chunk,
        compute,
    )


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
    entries = context.entries_of(edge_index)
    if entries is not None:
        return _local_matrix_norm(context, entries, improved, add_self_loops, flow, dtype)
    num_nodes = context.chunk.num_nodes
    options = (improved, add_self_loops, flow, dtype)
    if flow != "source_to_target":  # called by the model itself, or with edges that it changed
        if not context.sees_all:
            raise UnsupportedError(
                expected="edges that are normalised for flow='source_to_target'",
                found=f"flow='{flow}' on a part of the graph",
                remedy="Pass normalised edge weights to forward, or train with num_chunks=1 "
                "and graph_parallel=1.",
            )
        return cast(tuple[Tensor, Tensor], gcn_norm(edge_index, edge_weight, num_nodes, *options))
    known = _of_the_batch(
        context,
        ("gcn_norm", *options),
        edge_index,
        edge_weight,
        lambda edges, weight: gcn_norm(edges, weight, context.whole.num_nodes, *options),
    )
    if known is not None:
        return known
    if edge_weight is None:
        # Without weights PyG gives self-loops weight 1, even if `improved`.
        if add_self_loops:
            edge_index, _ = add_remaining_self_loops(edge_index, None, 1.0, num_nodes)
        weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    elif add_self_loops:
        loop = 2.0 if improved else 1.0
        edge_index, weight = add_remaining_self_loops(edge_index, edge_weight, loop, num_nodes)
    else:
        weight = edge_weight
    return edge_index, _by_degrees(context, edge_index, weight)


def _by_degrees(context: MessageContext, edge_index: Tensor, weight: Tensor) -> Tensor:
    """Return normalised weights: push the chunk's degrees to the power of -1/2, pull the halo's."""
    source, target = edge_index
    root = scatter(weight, target, 0, context.chunk.num_nodes, reduce="sum").pow(-0.5)
    own = root.masked_fill(root == float("inf"), 0.0)
    wide = context.widen("gcn_norm", context.next_call("gcn_norm"), "degree", own)
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

    def normalise(edges: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        num_nodes = context.whole.num_nodes
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
            loop, num_nodes = 2.0 if improved else 1.0, context.chunk.num_nodes
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
    known = _of_the_batch(
        context,
        ("get_laplacian", normalization, dtype),
        edge_index,
        edge_weight,
        lambda edges, weight: get_laplacian(
            edges, weight, normalization, dtype, context.whole.num_nodes
        ),
    )
    is_whole = context.sees_all or edge_index is context.whole.edge_index  # for `_local_rescaled`
    if known is None and not is_whole:
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
    known = None
    if batch is None and not isinstance(lambda_max, Tensor):
        known = _of_the_batch(
            context,
            ("laplacian", normalization, lambda_max, dtype),
            edge_index,
            edge_weight,
            lambda edges, weight: original(
                edges, context.whole.num_nodes, weight, normalization, lambda_max, dtype=dtype
            ),
        )
    if known is not None:
        return known
    if context.sees_all:
        return cast(
            tuple[Tensor, Tensor],
            original(edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch),
        )
    raise _refuse_laplacian()


def _refuse_laplacian() -> UnsupportedError:
    return UnsupportedError(
        expected="a Laplacian of the batch's own edges and edge weights",
        found="edges or weights that the model computes, a 'batch', or a tensor lambda_max",
        remedy="Pass edge weights to forward that need no gradient, and lambda_max as a "
        "number, or train with num_chunks=1.",
    )


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
        return cast(tuple[Tensor, Any], original(edge_index, edge_attr, fill_value, num_nodes))
    if context.edges_key[0] is None:
        raise UnsupportedError(
            expected=f"a layer on several edge sets to pass 'num_nodes' to {original.__name__}()",
            found="none",
            remedy="Pass num_nodes=x.size(0).",
        )
    chunk = context.chunk
    edges, attr = original(edge_index, edge_attr, fill_value, chunk.num_nodes)
    # PyG infers the number of nodes from the largest index: nodes beyond it get no loop.
    nodes = context.perm[chunk.start : chunk.end]
    keep = torch.ones(edges.size(1), dtype=torch.bool, device=edges.device)
    keep[edges.size(1) - chunk.num_nodes :] = nodes < context.num_numbered
    return edges[:, keep], None if attr is None else attr[keep]
