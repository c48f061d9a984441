"""Batches of graphs in the engine: shapes that change, norms over all nodes, what is refused."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch_geometric import nn as gnn
from torch_geometric.data import Batch

from lightning_gnnpipe.errors import ConfigError, GraphError, UnsupportedError
from lightning_gnnpipe.layers import check_graph_batches
from tests.helpers.batches import (
    GINE,
    NUM_FEATURES,
    SIZES,
    WIDTH,
    WeightedGCN,
    draw_batch,
)
from tests.helpers.engines import one_process_engine


def on_engine(module: nn.Module, num_chunks: int | str = 3, partition: Any = "metis") -> Any:
    """Return `module` in float64, run by an engine."""
    one_process_engine(module.double(), num_chunks=num_chunks, partition=partition).attach()
    return module


def run(net: nn.Module, data: Batch) -> Any:
    if isinstance(net, WeightedGCN):
        return net(data.x, data.edge_index, data.edge_weight, data.batch, data.num_graphs)
    return net(data) if isinstance(net, GINE) else net(data.x, data.edge_index, data.batch)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Normed(nn.Module):
    """Hands the batch vector, and what else is `given`, on to its norm, and pools if it is to."""

    def __init__(
        self, norm: nn.Module, *, passes_batch: bool = False, pools: bool = False, **given: Any
    ) -> None:
        super().__init__()
        self.conv, self.norm = gnn.GCNConv(NUM_FEATURES, WIDTH), norm
        self.last = gnn.GCNConv(WIDTH, WIDTH)
        self.passes_batch, self.pools, self.given = passes_batch, pools, given

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        x = self.norm(x, batch, **self.given) if self.passes_batch else self.norm(x)
        x = self.last(x, edge_index)
        return gnn.global_mean_pool(x, batch) if self.pools else x


class Centered(Normed):
    """Subtracts the mean over all nodes of the mini-batch: no norm that a list knows."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), edge_index, batch)


class Total(Normed):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return super().forward(x, edge_index, batch).sum(0)


NO_BATCH = "it is called without a batch vector"


@pytest.mark.parametrize(
    ("net", "text", "is_right_in_one"),
    [
        (Normed(gnn.GraphNorm(WIDTH)), f"'norm', a GraphNorm: {NO_BATCH}", True),
        (Normed(gnn.PairNorm()), f"'norm', a PairNorm: {NO_BATCH}", True),
        (Normed(gnn.LayerNorm(WIDTH)), f"'norm', a LayerNorm: {NO_BATCH}", True),
        (
            Normed(gnn.InstanceNorm(WIDTH, track_running_stats=True), passes_batch=True),
            "would be updated once per micro-batch",
            False,
        ),
        (Centered(nn.Identity()), "the same values on micro-batches as on the whole batch", True),
        (Total(nn.Identity()), "one row per node, edge or graph", False),
    ],
)
def test_what_looks_at_several_graphs_is_refused(
    net: nn.Module, text: str, is_right_in_one: bool
) -> None:
    data, single = draw_batch(SIZES), copy.deepcopy(net)
    with pytest.raises(UnsupportedError, match=text):
        run(on_engine(net), data)
    if is_right_in_one:
        run(on_engine(single, num_chunks=1), data)


class Rectified(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_a_batch_norm_with_a_forward_of_its_own_is_refused_in_several_micro_batches() -> None:
    plain, data = Normed(Rectified(WIDTH)).double(), draw_batch(SIZES)
    with pytest.raises(UnsupportedError, match="a Rectified: its forward is not that of"):
        run(on_engine(copy.deepcopy(plain)), data)
    assert_same(run(on_engine(copy.deepcopy(plain), num_chunks=1), data), run(plain, data))


def test_one_stage_runs_a_batch_as_it_is() -> None:
    """So BatchNorm is that of PyG, and power iterations run once."""
    for norm in (nn.BatchNorm1d(WIDTH), spectral_norm(nn.Linear(WIDTH, WIDTH))):
        plain, data = Normed(norm).double(), draw_batch(SIZES)
        net = on_engine(copy.deepcopy(plain), num_chunks="auto")
        for _ in range(2):
            found = run(net, data)
            assert_same(found, run(plain, data))
            found.sum().backward()
        assert_same(dict(net.named_buffers()), dict(plain.named_buffers()))


def test_batch_norm_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    net = on_engine(Normed(gnn.BatchNorm(WIDTH)))
    for _ in range(2):
        run(net, draw_batch(SIZES)).sum().backward()
    [told] = [one for one in caplog.messages if "the statistics of each micro-batch" in one]
    assert "BatchNorm ('norm.module')" in told


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_has_the_running_statistics_of_the_whole(momentum: Any) -> None:
    """Of the first layer, whose inputs do not depend on how rows are normalised."""
    plain = Normed(nn.BatchNorm1d(WIDTH, momentum=momentum)).double()
    net = on_engine(copy.deepcopy(plain), num_chunks=4)
    for seed in range(3):
        data = draw_batch(SIZES, seed)
        out = run(net, data)
        assert not torch.allclose(out, run(plain, data))
        out.sum().backward()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert_same(getattr(net.norm, name), getattr(plain.norm, name))


def test_deferred_batch_norm_normalises_each_micro_batch() -> None:
    plain, data = Normed(nn.BatchNorm1d(WIDTH)).double(), draw_batch((5, 5, 5, 5))
    out = run(on_engine(copy.deepcopy(plain), num_chunks=2), data)
    alike = list[tuple[int, ...]]()
    for pair in combinations(range(4), 2):
        part = Batch.from_data_list([data[graph] for graph in pair])
        rows = torch.isin(data.batch, torch.tensor(pair))
        if torch.allclose(out[rows], run(plain, part), rtol=1e-12, atol=1e-12):
            alike.append(pair)
    assert len(alike) == 2 and {*alike[0], *alike[1]} == {0, 1, 2, 3}


def test_a_batch_norm_gets_two_graphs_at_least() -> None:
    """Which may have a row each, as behind a pool: a last batch is often smaller."""
    plain = Normed(nn.BatchNorm1d(WIDTH)).double()
    net = on_engine(copy.deepcopy(plain), num_chunks=4)
    run(net, draw_batch((5, 5, 5, 5))).sum().backward()
    plain.load_state_dict(net.state_dict())
    data = draw_batch((5, 1, 1))
    assert_same(run(net, data), run(plain, data))


def test_micro_batches_without_rows_leave_running_statistics_finite() -> None:
    class OnEdges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lin = nn.BatchNorm1d(1), nn.Linear(1, NUM_FEATURES)
            self.conv = gnn.GINEConv(nn.Linear(NUM_FEATURES, WIDTH))

        def forward(
            self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor
        ) -> Tensor:
            return self.conv(x, edge_index, self.lin(self.norm(edge_attr)))

    plain = OnEdges().double()
    net = on_engine(copy.deepcopy(plain), num_chunks=2)
    data = draw_batch((9, 8, 1, 1))
    given = data.x, data.edge_index, data.edge_weight[:, None], data.batch
    for one in (plain, net):
        one(*given).sum().backward()
    assert_same(net.norm.running_var, plain.norm.running_var)
    assert_same(net.norm.running_mean, plain.norm.running_mean)


def test_options_for_one_graph_are_refused() -> None:
    net = on_engine(GINE(), num_chunks="auto", partition=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="'partition' to be left out for batches of graphs"):
        net(draw_batch(SIZES))
    with pytest.raises(UnsupportedError, match="a single large graph for graph_parallel"):
        check_graph_batches(2)


def joined(num_nodes: int) -> Tensor:
    """Return an edge between the first and the last node."""
    return torch.tensor([[0], [num_nodes - 1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"batch": a["batch"].flip(0)}, "ascending"),
        (lambda a: {"batch": a["batch"].int()}, "torch.int64"),
        (lambda a: {"batch": a["batch"][:-1]}, "one entry for each"),
        (lambda a: {"size": 2}, "to agree on the number of graphs"),
        (lambda a: {"edge_index": a["edge_index"] + 1000}, "to name nodes from 0 to"),
        (lambda a: {"edge_index": joined(a["x"].size(0))}, "to join two nodes of one graph"),
    ],
)
def test_malformed_batches_are_refused(change: Any, message: str) -> None:
    data = draw_batch(SIZES)
    given = {"x": data.x, "edge_index": data.edge_index, "batch": data.batch}
    given |= {"weight": data.edge_weight, "size": data.num_graphs}
    with pytest.raises(GraphError, match=message):
        on_engine(WeightedGCN())(**{**given, **change(given)})


class Conditioned(nn.Module):
    """Adds a tensor whose name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(NUM_FEATURES, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, extra: Tensor) -> Tensor:
        return self.conv(x, edge_index) + extra[batch].sum(-1, keepdim=True)


def test_rows_that_could_be_of_two_kinds_are_refused_unless_known() -> None:
    def inputs(sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        data = draw_batch(sizes)
        extra = torch.randn(data.num_graphs, 3, dtype=torch.float64)
        return data.x, data.edge_index, data.batch, extra

    plain, ambiguous = Conditioned().double(), inputs((2, 0, 1))  # three nodes, three graphs
    net = on_engine(copy.deepcopy(plain))
    with pytest.raises(GraphError, match="rows of 'extra' to show what the rows are"):
        net(*ambiguous)
    net(*inputs(SIZES)).sum().backward()
    assert_same(net(*ambiguous), plain(*ambiguous))


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (gnn.GraphNorm(WIDTH), {}),
        (gnn.GraphNorm(WIDTH), {"batch_size": 1}),
        (gnn.LayerNorm(WIDTH), {}),
        (gnn.InstanceNorm(WIDTH), {}),
        (gnn.PairNorm(), {}),
        (gnn.GraphSizeNorm(), {}),
        (gnn.GraphNorm(WIDTH), {"pools": True}),  # a batch of one graph
    ],
)
def test_a_batch_vector_of_zeros_is_one_graph(norm: nn.Module, options: dict[str, Any]) -> None:
    """Which trains in chunks, behind an exact step, unless it is pooled."""
    net = Normed(norm, passes_batch=True, **options)
    data, plain = draw_batch((40,)), copy.deepcopy(net)
    engine = one_process_engine(net, num_chunks=4)
    engine.attach()
    net.float()  # PyG's LayerNorm adds eps elsewhere where it is given a batch vector
    data.x = data.x.float()
    for step, num_chunks in enumerate((1, 1 if net.pools else 4)):
        engine.set_step(step_index=step)
        found, expected = run(net, data), run(plain, data)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for out, one in ((found, net), (expected, plain)):
            one.zero_grad()
            out.square().sum().backward()
        assert engine.last_step.record is not None
        assert engine.last_step.record.num_chunks == num_chunks
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert num_chunks > 1 or torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3)
