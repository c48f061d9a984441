"""What stands in the place of PyG's functions is seen by the layers on chunks alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.nn.conv import gcn_conv, han_conv

from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.layers import find_layers, intercept
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.stages.trace import traceable
from lightning_gnnpipe.staleness import HistoryStore

RING = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
X = torch.rand(6, 3)


def run_elsewhere(conv: gnn.GCNConv) -> Tensor:
    """Run a network on a graph of as many nodes as the chunk has."""
    with torch.no_grad():
        return conv(torch.eye(3), torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))


def test_another_network_runs_as_it_would_alone() -> None:
    """In hooks within and behind a layer, in this thread and in another one."""
    layer, other = gnn.GCNConv(3, 3), gnn.GCNConv(3, 3)
    expected, found = run_elsewhere(other), []
    plan = plan_from_assignment(RING, 6, torch.tensor([0, 0, 0, 1, 1, 1]))
    context = MessageContext(HistoryStore(6, plan.num_chunks), plan)

    def in_thread(*_: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(run_elsewhere, other).result())

    for one in (layer, layer.lin):
        one.register_forward_hook(in_thread)
    layer.register_forward_hook(lambda *_: found.append(run_elsewhere(other)))
    before = gcn_conv.gcn_norm, han_conv.group
    with intercept(find_layers(layer), context):
        for chunk in (*plan.whole.chunks, *plan.chunks):
            context.enter(chunk, 0, {})
            layer(X[chunk.start : chunk.end], chunk.edge_index)
            context.leave()
    assert (gcn_conv.gcn_norm, han_conv.group) == before
    assert len(found) == 9
    for one in found:
        torch.testing.assert_close(one, expected)


def test_what_tracing_replaces_is_not_seen_in_another_thread() -> None:
    """An aggregation refuses an index of another length than the rows, if it looks at values."""
    with traceable(torch.nn.Linear(1, 1)), ThreadPoolExecutor(1) as pool:
        work = pool.submit(gnn.SumAggregation(), X, torch.tensor([3, 9]), dim_size=2)
        with pytest.raises(ValueError, match="Encountered invalid"):
            work.result()
