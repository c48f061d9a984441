"""Exact passes in chunks: their numbers are compared with PyG's beside those of other passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe._compat_torch import DispatchMode
from lightning_gnnpipe.errors import ConfigError
from tests.engine.test_recompute import NETS, PARTITION
from tests.engine.test_recompute import graph as small_graph
from tests.helpers.engines import one_process_engine

N, E, D, CHUNKS = 1000, 8000, 16, 10


def graph() -> tuple[Tensor, Tensor]:
    number = torch.arange(E)
    edges = torch.stack([(number * 7 + number // N) % N, (number * 3 + 1) % N])
    return torch.sin(torch.arange(N * D).float()).view(N, D), edges


class Watch(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that an operation makes, and the most bytes alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.largest = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor):
                known = StorageWeakRef(one.untyped_storage())
                self.alive[known.cdata] = known, one.untyped_storage().nbytes()
                self.largest = max(self.largest, one.nbytes)
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("trains", [False, True])
def test_less_is_alive(trains: bool) -> None:
    """No tensor has a row for each edge of the graph, and few have one for each node."""

    def watch(in_chunks: bool) -> Watch:
        torch.manual_seed(0)
        net = gnn.GAT(D, D, num_layers=6, heads=2).train(trains)
        partition = torch.arange(N) * CHUNKS // N
        engine = one_process_engine(net, partition=partition, exact_in_chunks=in_chunks)
        engine.controls.is_exact, inputs = True, graph()
        for turn in range(2):
            engine.set_step(step_index=turn)
            watched = Watch()
            with torch.set_grad_enabled(trains), watched:
                output = engine.forward(inputs, {})
                if trains:
                    output.sum().backward()
            del output
        return watched

    whole, chunks = watch(False), watch(True)
    assert chunks.most < whole.most / 2
    assert chunks.largest < whole.largest / 4


def test_the_same_under_autocast() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                gnn.GATConv(D, D),
                gnn.GraphNorm(D),
                gnn.SAGEConv(D, D),
            )

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x, edge_index)).relu(), edge_index)

    found = []
    for in_chunks in (False, True):
        torch.manual_seed(0)
        net, partition = Net(), torch.arange(N) * CHUNKS // N
        engine = one_process_engine(net, partition=partition, exact_in_chunks=in_chunks)
        with torch.autocast("cpu", torch.bfloat16):
            output = engine.forward(graph(), {})
        output.float().square().sum().backward()
        found.append([output.detach(), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("double")
def test_gradients_are_of_the_dropped_rows() -> None:
    """Layers drop the same rows each time that they run, so differences of losses agree."""
    net, inputs = NETS["mixed"](), small_graph()
    weights = list(net.parameters())
    along = [torch.sin(torch.arange(p.numel()) + 1.0).view_as(p) for p in weights]

    def loss(shift: float) -> float:
        for weight, by in zip(weights, along, strict=True):
            weight.data += shift * by
        net.zero_grad()
        engine = one_process_engine(net, partition=PARTITION, exact_in_chunks=True)
        found = engine.forward(inputs, {}).sin().sum()
        found.backward()
        return float(found)

    ahead, behind = loss(1e-6), loss(-2e-6)
    loss(1e-6)
    slope = sum(float((p.grad * by).sum()) for p, by in zip(weights, along, strict=True))
    assert abs(slope) > 0.1
    assert abs((ahead - behind) / 2e-6 - slope) < 1e-5


@pytest.mark.parametrize("other", [{"graph_parallel": 2}, {"cross_chunk_edges": "drop"}])
def test_shards_and_dropped_edges_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'exact_in_chunks' to be left out with"):
        GNNPipeStrategy(exact_in_chunks=True, **other)
