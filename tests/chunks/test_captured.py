"""Chunks as CUDA graphs: the same numbers as eager code, in any order of chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.staleness import METHODS
from tests.helpers.cuda_graphs import cuda_graphs
from tests.helpers.device import DEVICE
from tests.helpers.engines import one_process_engine

D, NUM_CHUNKS, NUM_STEPS = 4, 4, 9
EXACT, RECORDED = 5, 6  # steps that run eagerly in between


def net(conv: Callable[[], Any], norm: Callable[[], Any]) -> nn.Module:
    layers: list[Any] = [(nn.Linear(D, D), "x -> x")]
    for _ in range(3):
        layers += [(conv(), "x, edge_index -> x"), (norm(), "x -> x"), nn.ReLU(), nn.Dropout(0.3)]
    return gnn.Sequential("x, edge_index", layers).double()


def graph() -> tuple[Tensor, Tensor]:
    nodes = torch.arange(5 * NUM_CHUNKS)
    edges = torch.cartesian_prod(nodes, nodes).T
    near = (edges[0] - edges[1]).abs() % 7
    edges = edges[:, (near > 0) & (near < 4)]
    return torch.randn(len(nodes), D, dtype=torch.float64).to(DEVICE), edges.to(DEVICE)


def train(
    module: nn.Module,
    *,
    captured: bool,
    change: Callable[[int, nn.Module], None] = lambda step, module: None,
    needs_grad: bool = False,
) -> list[Tensor]:
    """Return outputs, gradients, buffers and weights of all steps."""
    x, edges = graph()
    x.requires_grad_(needs_grad)
    parts = torch.arange(len(x)) % NUM_CHUNKS
    engine = one_process_engine(
        module, partition=parts, method=METHODS["drift"], self_check=False, cuda_graphs=captured
    )
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    found = []
    for step in range(NUM_STEPS):
        change(step, module)
        engine.set_step(step_index=step)
        engine.controls.is_exact = step == EXACT
        engine.controls.records_staleness = step == RECORDED
        optimizer.zero_grad()
        output = engine.forward((x, edges), {})
        (output**2).sum().backward()
        engine.controls.reset()
        found += [output.detach(), *(one.grad for one in module.parameters())]
        found += [one.clone() for one in module.buffers()]
        optimizer.step()
    written = [min(engine.graphs.trained.store._entries[k].written) for k in engine.graphs.trained.store]
    assert set(written) == {NUM_STEPS - 1}
    return [*found, *([x.grad] if needs_grad else [])]


def both(module: nn.Module, **options: Any) -> tuple[int, int]:
    """Train captured and eagerly, and compare; return the numbers of captures and replays."""
    torch.manual_seed(0)
    other = copy.deepcopy(module).to(DEVICE)
    eager = train(other, captured=False, **options)
    torch.manual_seed(0)
    with cuda_graphs() as counts:
        found = train(module.to(DEVICE), captured=True, **options)
    torch.testing.assert_close(found, eager, rtol=1e-12, atol=1e-12)
    return counts.captures.value, counts.replays.value


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gcn-layer": (lambda: gnn.GCNConv(D, D), lambda: nn.LayerNorm(D)),
    "gcn-batch": (lambda: gnn.GCNConv(D, D), lambda: nn.BatchNorm1d(D)),
    "sage-graph": (lambda: gnn.SAGEConv(D, D), lambda: gnn.GraphNorm(D)),
    "gat-layer": (lambda: gnn.GATConv(D, D), lambda: nn.LayerNorm(D)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_graphs_compute_what_eager_code_does(name: str) -> None:
    captures, replays = both(net(*LAYERS[name]), needs_grad=name == "gat-layer")
    if DEVICE.type == "cpu":
        num_eager = 2 + 2  # the first exact and pipelined step, EXACT, RECORDED
        assert captures == 2 * NUM_CHUNKS
        assert replays == 2 * NUM_CHUNKS * (NUM_STEPS - num_eager)
