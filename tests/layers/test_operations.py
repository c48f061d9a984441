"""What one more chunk costs a layer: operations, calls of the package, and no casts of weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn

import lightning_gnnpipe
from lightning_gnnpipe._compat_torch import DispatchMode
from lightning_gnnpipe.staleness import METHODS
from tests.helpers.engines import one_process_engine

D = 8
PACKAGE = str(Path(lightning_gnnpipe.__file__).parent)


class Counter(AbstractContextManager[Any], Protocol):
    count: int


class Operations(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute or copy, not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ == "detach")
        return func(*args, **(kwargs or {}))


class Casts(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts casts of weights."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func.overloadpacket.__name__ == "_to_copy"
        self.count += is_cast and isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


class Calls(AbstractContextManager["Calls"]):
    """Counts calls of the package's functions."""

    count = 0

    def __enter__(self) -> Calls:
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        self.count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)


def count(
    counter: Callable[[], Counter],
    make: Callable[[], list[Any]],
    num_layers: int,
    num_chunks: int,
    *,
    mixed: bool = False,
) -> int:
    """Return the count of a pipelined step in which each chunk borders on all others."""
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
    for step in range(3):  # the first is exact, the second binds layers to chunks
        engine.set_step(step_index=step)
        with counter() as found:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                output = engine.forward(graph, {})
            output.sum().backward()
    return int(found.count)


LAYERS: dict[str, tuple[Callable[[], list[Any]], int]] = {
    "gcn-layer": (lambda: [gnn.GCNConv(D, D), nn.LayerNorm(D)], 20),
    "gcn-batch": (lambda: [gnn.GCNConv(D, D), nn.BatchNorm1d(D)], 39),
    "sage-graph": (lambda: [gnn.SAGEConv(D, D), gnn.GraphNorm(D)], 52),
    "gat-layer": (lambda: [gnn.GATConv(D, D), nn.LayerNorm(D)], 85),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_more_chunk_costs_a_layer_the_same_few_operations(name: str) -> None:
    make, limit = LAYERS[name]
    sizes = 6, 12, 36
    small, middle, large = (
        count(Operations, make, 3, k) - count(Operations, make, 2, k) for k in sizes
    )
    assert (middle - small) / 6 == (large - middle) / 24 <= limit


@pytest.mark.parametrize("name", LAYERS)
def test_one_more_chunk_costs_a_layer_few_calls(name: str) -> None:
    """What does not change from step to step is looked up, not found again."""
    make, _ = LAYERS[name]
    small, large = (count(Calls, make, 3, k) - count(Calls, make, 2, k) for k in (4, 8))
    assert 0 < (large - small) / 4 <= 40


def test_weights_are_cast_once_a_step() -> None:
    make, _ = LAYERS["gat-layer"]
    small, large = (count(Casts, make, 2, k, mixed=True) for k in (6, 12))
    assert small == large > 0
