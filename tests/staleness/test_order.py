"""Numbers of a step's order: of each store its own, and in half types no overflow."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.passing.aggregate import BoundHalo, CallKey
from lightning_gnnpipe.staleness import METHODS, HistoryOptions, HistoryStore
from tests.helpers.engines import one_process_engine

N, D, NUM_CHUNKS = 24, 4, 4
PARTS = torch.arange(N) % NUM_CHUNKS


def outputs(inputs: Collection[int], recompute: bool) -> dict[int, Tensor]:
    """Train on these of two inputs in turn; return the outputs by step."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, N, (2, 5 * N), generator=generator)
    rows = torch.randn(2, N, D, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    layers = [(gnn.GCNConv(D, D), "x, edge_index -> x"), nn.Tanh()] * 2
    net = gnn.Sequential("x, edge_index", [(nn.Identity(), "x -> x"), *layers]).double()
    engine = one_process_engine(
        net, partition=PARTS, method=METHODS["drift"], self_check=False, recompute=recompute
    )
    found = {}
    for step in range(8):
        with torch.no_grad():
            for weight in net.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
        if step % 2 in inputs:
            engine.set_step(step_index=step)
            engine.identity.begin_step(net, lambda: 0)
            found[step] = engine.forward((rows[step % 2], edges), {})
            found[step].sum().backward()
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_two_inputs_on_one_graph_are_trained_as_each_alone(recompute: bool) -> None:
    both = outputs((0, 1), recompute)
    for one in (0, 1):
        alone = outputs((one,), recompute)
        assert len(alone) == 4
        for step, expected in alone.items():
            torch.testing.assert_close(both[step], expected, rtol=0, atol=1e-12)


def test_float16_holds_the_drift_of_many_rows() -> None:
    count = 200_000
    edges = torch.tensor([[count - 1, 0], [0, count - 1]])
    plan = plan_from_assignment(edges, count, torch.arange(count) // (count // 2))
    ends = [chunk.end for chunk in plan.chunks]
    store = HistoryStore(count, 2, HistoryOptions(METHODS["drift"]), ends)
    key = CallKey(0, "layer", 0, "x")
    store.push(key, plan.whole.chunks[0], torch.zeros(count, 1, dtype=torch.float16))
    store.begin_step(1, (0, 1))
    bound = BoundHalo(key, plan.chunks[0], store, is_linear=False)
    halo = bound.forward(torch.ones(count // 2, 1, dtype=torch.float16), None)[-1:]
    torch.testing.assert_close(halo, torch.ones_like(halo), rtol=0, atol=2e-3)
