"""What one more chunk costs a layer in operations, forward and backward, drift included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn

from lightning_gnnpipe._compat_torch import DispatchMode
from lightning_gnnpipe.staleness import METHODS
from tests.helpers.engines import one_process_engine

D = 8


class Operations(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute or copy, not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ == "detach")
        return func(*args, **(kwargs or {}))


def operations(make: Callable[[], list[Any]], num_layers: int, num_chunks: int) -> int:
    """Return the operations of a pipelined step in which each chunk borders on all others."""
    layers: list[Any] = [(nn.Identity(), "x -> x")]
    for _ in range(num_layers):
        conv, norm = make()
        layers += [(conv, "x, edge_index -> x"), (norm, "x -> x"), nn.ReLU()]
    nodes = torch.arange(2 * num_chunks)
    edges = torch.cartesian_prod(nodes, nodes).T
    graph = torch.randn(len(nodes), D), edges[:, edges[0] != edges[1]]
    engine = one_process_engine(
        gnn.Sequential("x, edge_index", layers),
        partition=nodes % num_chunks,
        method=METHODS["drift"],
        self_check=False,
    )
    for step in range(2):  # the first is exact
        engine.set_step(step_index=step)
        with Operations() as found:  # type: ignore[no-untyped-call]
            engine.forward(graph, {}).sum().backward()
    return int(found.count)


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda: [gnn.GCNConv(D, D), nn.LayerNorm(D)], 20),
        (lambda: [gnn.GCNConv(D, D), nn.BatchNorm1d(D)], 45),
        (lambda: [gnn.SAGEConv(D, D), gnn.GraphNorm(D)], 55),
        (lambda: [gnn.GATConv(D, D), nn.LayerNorm(D)], 85),
    ],
    ids=["gcn-layer", "gcn-batch", "sage-graph", "gat-layer"],
)
def test_one_more_chunk_costs_a_layer_the_same_few_operations(
    make: Callable[[], list[Any]], limit: int
) -> None:
    sizes = 6, 12, 36
    small, middle, large = (operations(make, 3, k) - operations(make, 2, k) for k in sizes)
    assert (middle - small) / 6 == (large - middle) / 24 <= limit
