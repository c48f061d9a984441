"""Layers that pass messages against the edges of the batch, on one chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import ClusterGCNConv, MessagePassing

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import ChunkMatrix, MessageContext, replace_attributes


def direct(name: str, conv: MessagePassing, context: MessageContext) -> Callable[..., Any]:
    """Return the layer's forward, with the chunk's edges in the direction that it reads them.

    A layer on flipped edges (DirGNNConv), or with flow "target_to_source", needs the edges that
    start in the chunk. With this flow it runs as a "source_to_target" layer on flipped edges.
    """
    original = conv.forward
    is_upstream = conv.flow == "target_to_source"

    def call(args: Any, kwargs: Any, given: Any, edges: Any, is_reverse: bool) -> Any:
        """Call the layer with `edges` instead of `given`."""

        def turn(key: str, value: Any) -> Any:
            if value is given:
                return edges
            return _turn(name, key, value, context) if is_reverse else value

        return original(
            *(turn("", value) for value in args),
            **{key: turn(key, value) for key, value in kwargs.items()},
        )

    @context.in_layer()
    def run(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        matrix = next((one for one in values if isinstance(one, ChunkMatrix)), None)
        if matrix is not None:
            with matrix.along() as entries:
                # ClusterGCNConv asks for a square matrix; it only counts the entries of a row.
                is_square = isinstance(conv, ClusterGCNConv) and entries.layout is not None
                edges = entries.edges if is_square else context.as_matrix(entries)
                return call(args, kwargs, matrix, edges, False)
        given, number, is_flip = _find_edges(values, name, context)
        if given is None:
            if is_upstream and not context.sees_all:
                raise _refuse_direction(name, "edges that the model changed, or several edge sets")
            return original(*args, **kwargs)
        # On the whole graph without histories, PyG handles reversed edges itself.
        if context.is_plain or not (is_flip or is_upstream):
            with context.along(given):
                return original(*args, **kwargs)
        is_reverse = is_flip != is_upstream
        downstream = replace_attributes(conv, {"flow": "source_to_target"})
        with context.directed(number, is_reverse) as edges, downstream:
            return call(args, kwargs, given, edges, is_reverse)

    return run


def _find_edges(
    values: Sequence[Any], name: str, context: MessageContext
) -> tuple[Tensor | None, int, bool]:
    """Return the argument with the chunk's edges, their set, and whether its rows are swapped.

    The argument is None if there are no edges, or several sets: `propagate` then finds the set.
    """
    found = [(value, i) for value in values if (i := context.find_edges(value)) is not None]
    if found:
        is_one = len({number for _, number in found}) == 1
        return (*found[0], False) if is_one else (None, 0, False)
    if not context.is_plain:
        for value in values:
            is_edges = isinstance(value, Tensor) and value.dim() == 2 and value.size(0) == 2
            if is_edges and value.dtype == torch.int64:
                number = context.find_flip(name, value)
                if number is not None:
                    return value, number, True
    return None, 0, False


def _turn(name: str, key: str, value: Any, context: MessageContext) -> Any:
    """Return `value` for the reversed edges, if it is an edge-level leaf of the batch."""
    if not isinstance(value, Tensor):
        return value
    part = context.reversed_leaf(value)
    if part is not None:
        return part
    if key.startswith("edge") and not context.sees_all:
        raise _refuse_direction(name, f"'{key}' that the model computes, or that needs a gradient")
    return value


def _refuse_direction(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        expected=f"layer '{name}', which passes messages against the edges, to use the batch's "
        "own edges and edge features",
        found=found,
        remedy="Pass the edges and their features to forward unchanged, or train with "
        "num_chunks=1.",
    )
