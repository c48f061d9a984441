"""Batches of graphs in the engine: shapes that change, norms over all nodes, what is refused."""

from __future__ import annotations

import gc
import random
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Batch

from lightning_gnnpipe.comm import Meter, Transport, World
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.errors import ConfigError, GraphError, UnsupportedError
from lightning_gnnpipe.layers import check_graph_batches
from lightning_gnnpipe.stages import cut
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.steps import ChunkOptions, Controls, EngineOptions
from tests.helpers.batches import (
    GINE,
    NUM_FEATURES,
    SIZES,
    WIDTH,
    Jumping,
    WeightedGCN,
    draw_batch,
)


def make_engine(module: nn.Module, num_chunks: int | str = 3, **options: Any) -> PipelineEngine:
    world = World(0, 1, torch.device("cpu"), timedelta(seconds=60))
    transport = Transport(world, (1, 1), Meter())
    partition = options.pop("partition", "metis")
    settings = {"chunk_order": "shuffled", "balance": "uniform", "seed": 0, "is_fitting": True}
    engine = PipelineEngine(
        module.double(),
        transport,
        EngineOptions(
            chunks=ChunkOptions(num_chunks, partition, seed=0),
            histories=HistoryOptions(),
            **{**settings, **options},
        ),
        Controls(),
    )
    engine.attach()
    return engine


def arguments(net: nn.Module, data: Batch) -> tuple[Any, ...]:
    if isinstance(net, WeightedGCN):
        return data.x, data.edge_index, data.edge_weight, data.batch, data.num_graphs
    if isinstance(net, Jumping):
        return data.x, data.edge_index, data.batch
    return (data,)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "num_steps"), [(GINE, 1000), (WeightedGCN, 200), (Jumping, 200)])
def test_a_thousand_random_batches(
    make: Any, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 to 64 graphs, empty ones, a single node: no error, no new trace, nothing kept."""
    traces = []
    original = cut.trace
    monkeypatch.setattr(cut, "trace", lambda *a, **k: traces.append(0) or original(*a, **k))
    net = make(0.2)
    make_engine(net, num_chunks=5)
    draw = random.Random(0)
    tensors = 0
    for step in range(num_steps):
        sizes = [draw.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(draw.randint(1, 64))]
        sizes = sizes if any(sizes) else [1]
        data = draw_batch(sizes, seed=step, degree=draw.choice((0.0, 1.0, 2.0)))
        out = net(*arguments(net, data))
        total = sum(t.sum() for t in (out.values() if isinstance(out, dict) else [out]))
        total.backward()
        net.zero_grad()
        del out, total, data
        if step in (num_steps // 2 - 1, num_steps - 1):
            gc.collect()
            count = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
            assert step < num_steps // 2 or count <= tensors + 20
            tensors = count
    assert len(traces) <= 5  # four forms of batches, and the first one in evaluation


class Normed(nn.Module):
    def __init__(self, norm: nn.Module, passes_batch: bool = False) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(NUM_FEATURES, WIDTH)
        self.norm = norm
        self.last = gnn.GCNConv(WIDTH, WIDTH)
        self.passes_batch = passes_batch

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        x = self.norm(x, batch) if self.passes_batch else self.norm(x)
        return self.last(x, edge_index)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (gnn.GraphNorm(WIDTH), "'norm', a GraphNorm: it is called without a batch vector"),
        (gnn.PairNorm(), "'norm', a PairNorm: it is called without a batch vector"),
        (gnn.LayerNorm(WIDTH), "'norm', a LayerNorm: it is called without a batch vector"),
    ],
)
def test_norms_over_all_graphs_are_refused(norm: nn.Module, reason: str) -> None:
    net, data = Normed(norm), draw_batch(SIZES)
    make_engine(net)
    with pytest.raises(UnsupportedError, match=reason):
        net(data.x, data.edge_index, data.batch)

    single = Normed(norm)
    make_engine(single, num_chunks=1)
    single(data.x, data.edge_index, data.batch)


def test_running_statistics_of_instance_norm_are_refused() -> None:
    net = Normed(gnn.InstanceNorm(WIDTH, track_running_stats=True), passes_batch=True)
    make_engine(net)
    data = draw_batch(SIZES)
    with pytest.raises(UnsupportedError, match="would be updated once per micro-batch"):
        net(data.x, data.edge_index, data.batch)


def test_batch_norm_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    net, data = Normed(gnn.BatchNorm(WIDTH)), draw_batch(SIZES)
    make_engine(net)
    for _ in range(2):
        net(data.x, data.edge_index, data.batch).sum().backward()
    told = [
        one for one in caplog.records if "the statistics of each micro-batch" in one.getMessage()
    ]
    assert len(told) == 1 and "BatchNorm ('norm.module')" in told[0].getMessage()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_has_the_running_statistics_of_the_whole(momentum: Any) -> None:
    """Of the first layer, whose inputs do not depend on how rows are normalised."""
    torch.manual_seed(0)
    net = Normed(nn.BatchNorm1d(WIDTH, momentum=momentum)).double()
    plain = Normed(nn.BatchNorm1d(WIDTH, momentum=momentum)).double()
    plain.load_state_dict(net.state_dict())
    make_engine(net, num_chunks=4)
    for seed in range(3):
        data = draw_batch(SIZES, seed)
        out = net(data.x, data.edge_index, data.batch)
        expected = plain(data.x, data.edge_index, data.batch)
        assert not torch.allclose(out, expected)
        out.sum().backward()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            ours, theirs = getattr(net.norm, name), getattr(plain.norm, name)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    net.eval(), plain.eval()
    with torch.no_grad():  # row by row, and exact
        found = net(data.x, data.edge_index, data.batch)
        expected = plain(data.x, data.edge_index, data.batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_deferred_batch_norm_normalises_each_micro_batch() -> None:
    net = Normed(nn.BatchNorm1d(WIDTH)).double()
    make_engine(net, num_chunks=2)
    data = draw_batch((5, 5))
    out = net(data.x, data.edge_index, data.batch)
    plain = Normed(nn.BatchNorm1d(WIDTH)).double()
    plain.load_state_dict(net.state_dict())
    for graph in range(2):
        part = data[graph]
        rows = out[data.batch == graph]
        expected = plain(part.x, part.edge_index, torch.zeros(5, dtype=torch.int64))
        torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12)


def test_one_row_for_a_deferred_batch_norm_is_refused() -> None:
    net = Normed(nn.BatchNorm1d(WIDTH))
    make_engine(net, num_chunks=4)
    data = draw_batch((5, 5, 5, 5))
    net(data.x, data.edge_index, data.batch).sum().backward()
    data = draw_batch((5, 1))
    with pytest.raises(UnsupportedError, match="at least two rows"):
        net(data.x, data.edge_index, data.batch)


class Centered(nn.Module):
    """Subtracts the mean over all nodes of the mini-batch: no norm that a list knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(NUM_FEATURES, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.conv(x - x.mean(0), edge_index)


class Total(Centered):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.conv(x, edge_index).sum(0)


def test_what_looks_at_several_graphs_is_refused() -> None:
    net, data = Centered(), draw_batch(SIZES)
    make_engine(net)
    with pytest.raises(UnsupportedError, match="the same on micro-batches as on the whole batch"):
        net(data.x, data.edge_index, data.batch)
    alone = Centered()
    make_engine(alone, num_chunks=1)
    alone(data.x, data.edge_index, data.batch)


def test_one_row_for_all_graphs_is_refused() -> None:
    net, data = Total(), draw_batch(SIZES)
    make_engine(net)
    with pytest.raises(UnsupportedError, match="one row per node, edge or graph"):
        net(data.x, data.edge_index, data.batch)


def test_options_for_one_graph_are_refused() -> None:
    data = draw_batch(SIZES)
    net = GINE()
    make_engine(net, num_chunks="auto", partition=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="'partition' to be left out for batches of graphs"):
        net(data)
    with pytest.raises(UnsupportedError, match="a single large graph for graph_parallel"):
        check_graph_batches(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {**a, "batch": a["batch"].flip(0)}, "ascending"),
        (lambda a: {**a, "batch": a["batch"].int()}, "torch.int64"),
        (lambda a: {**a, "batch": a["batch"][:-1]}, "one entry for each"),
        (lambda a: {**a, "size": 2}, "to agree on the number of graphs"),
        (lambda a: {**a, "edge_index": a["edge_index"] + 1000}, "to name nodes from 0 to"),
        (lambda a: {**a, "edge_index": joined(a["x"].size(0))}, "to join two nodes of one graph"),
    ],
)
def test_malformed_batches_are_refused(change: Any, message: str) -> None:
    data = draw_batch(SIZES)
    net = WeightedGCN()
    make_engine(net)
    given = {
        "x": data.x,
        "edge_index": data.edge_index,
        "weight": data.edge_weight,
        "batch": data.batch,
        "size": data.num_graphs,
    }
    with pytest.raises(GraphError, match=message):
        net(**change(given))


def joined(num_nodes: int) -> Tensor:
    """Return an edge between the first and the last node."""
    return torch.tensor([[0], [num_nodes - 1]])


class Conditioned(nn.Module):
    """Adds a tensor whose name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(NUM_FEATURES, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, extra: Tensor) -> Tensor:
        return self.conv(x, edge_index) + extra[batch].sum(-1, keepdim=True)


def test_rows_that_could_be_of_two_kinds_are_refused_unless_known() -> None:
    ambiguous = draw_batch((2, 0, 1))  # three nodes, three graphs
    ambiguous_extra = torch.randn(3, 3, dtype=torch.float64)
    net = Conditioned()
    make_engine(net)
    with pytest.raises(GraphError, match="rows of 'extra' to show what the rows are"):
        net(ambiguous.x, ambiguous.edge_index, ambiguous.batch, ambiguous_extra)

    clear = draw_batch(SIZES)
    extra = torch.randn(clear.num_graphs, 3, dtype=torch.float64)
    net(clear.x, clear.edge_index, clear.batch, extra).sum().backward()
    found = net(ambiguous.x, ambiguous.edge_index, ambiguous.batch, ambiguous_extra)
    plain = Conditioned().double()
    plain.load_state_dict(net.state_dict())
    expected = plain(ambiguous.x, ambiguous.edge_index, ambiguous.batch, ambiguous_extra)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
