"""Layers on one chunk: each runs along the edges that it is given, turned ones among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_geometric.nn import ClusterGCNConv, MessagePassing

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import ChunkMatrix, MessageContext, replace_attributes


def direct(name: str, conv: MessagePassing, context: MessageContext) -> Callable[..., Any]:
    """Return the layer's forward, with the chunk's edges in the direction that it reads them.

    A layer on turned edges (DirGNNConv), or with flow "target_to_source", needs the edges that
    start in the chunk. With this flow it runs as a "source_to_target" layer on turned edges.
    """
    original, is_upstream = conv.forward, conv.flow == "target_to_source"

    @context.in_layer()
    def run(*args: Any, **kwargs: Any) -> Any:
        def call(given: Any, edges: Any) -> Any:
            """Call the layer with `edges` instead of `given`."""
            named = {key: edges if value is given else value for key, value in kwargs.items()}
            return original(*(edges if value is given else value for value in args), **named)

        values = (*args, *kwargs.values())
        matrix = next((one for one in values if isinstance(one, ChunkMatrix)), None)
        if matrix is not None:
            with matrix.along() as entries:
                # ClusterGCNConv asks for a square matrix; it only counts the entries of a row.
                is_square = isinstance(conv, ClusterGCNConv) and entries.layout is not None
                return call(matrix, entries.edges if is_square else context.as_matrix(entries))
        found = [(one, place) for one in values if (place := context.find_edges(one)) is not None]
        if len({place for _, place in found}) != 1:  # none, or several sets: `propagate` finds them
            if is_upstream and not context.sees_all:
                raise UnsupportedError(
                    f"Layer '{name}' with flow='target_to_source' has no edge_index that is an "
                    "argument of forward, or several.\nA chunk has the edges that end in its "
                    "nodes.\nPass edge_index.flip(0) as an argument, to a layer without flow=."
                )
            return original(*args, **kwargs)
        given, (number, is_turned) = found[0]
        # On the whole graph without histories, PyG handles turned edges itself.
        if context.is_plain or not (is_turned or is_upstream):
            with context.along(given):
                return original(*args, **kwargs)
        downstream = replace_attributes(conv, {"flow": "source_to_target"})
        with context.directed(number, is_turned != is_upstream) as edges, downstream:
            return call(given, edges)

    return run
