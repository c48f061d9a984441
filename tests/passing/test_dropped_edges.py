"""P4 without edges between chunks: every layer equals PyG on the graph that was cut by hand."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers import find_convs
from lightning_gnnpipe.staleness import METHODS
from tests.helpers.cases import name_of, some
from tests.helpers.convs import CASES, ConvCase, ConvNet, D, attributed
from tests.helpers.engines import one_process_engine
from tests.helpers.reference import StaleOracle
from tests.passing.test_convs import (
    ORDER,
    OWN,
    PARTITION,
    N,
    assert_same,
    gradients,
    make_batch,
    step,
)
from tests.passing.test_convs_on_shards import UPSTREAM

pytestmark = [
    pytest.mark.filterwarnings("ignore:We do not recommend using the non-optimized CPU"),
    pytest.mark.usefixtures("double", "splines"),
]

SEEN_LATE = {"HANConv"}  # its mean over all nodes is a step old, edges or no edges
ALONE = [case for case in [*CASES, *OWN, *UPSTREAM] if case.conv not in SEEN_LATE]


def cut_by_hand(batch: dict[str, Tensor], partition: Tensor = PARTITION) -> dict[str, Tensor]:
    """Return the batch without the edges between chunks, and what belongs to them."""
    cut = dict(batch)
    for prefix in ("", "other_"):
        if f"{prefix}edge_index" not in batch:
            continue
        source, target = partition[batch[f"{prefix}edge_index"]]
        for name in ("edge_weight", "edge_attr", "edge_type"):
            if f"{prefix}{name}" in batch:
                cut[f"{prefix}{name}"] = batch[f"{prefix}{name}"][source == target]
        cut[f"{prefix}edge_index"] = batch[f"{prefix}edge_index"][:, source == target]
    return cut


def plain_copy(net: nn.Module) -> nn.Module:
    """Return a copy that remembers nothing of the graphs that `net` has seen."""
    plain = copy.deepcopy(net)
    for conv in find_convs(plain).values():
        if getattr(conv, "cached", False):
            conv.cached, conv._cached_edge_index = False, None
    return plain


def move(net: nn.Module, by: float) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            size = torch.arange(parameter.numel()) + number
            parameter += by * torch.sin(size).view_as(parameter)


@pytest.mark.parametrize(
    ("case", "recompute"), some(product(ALONE, [False, True]), every=5), ids=name_of
)
def test_p4_conv_equals_pyg_on_the_cut_graph(case: ConvCase, recompute: bool) -> None:
    """From the first step on, with weights that move; and on the whole graph in between."""
    batch = make_batch(case=case)
    cut = cut_by_hand(batch)
    net, weight = ConvNet(case, batch), torch.randn(N, D)
    engine = one_process_engine(net, partition=PARTITION, cross_edges="drop", recompute=recompute)
    if case.is_mesh:  # needs groups of four edges, which are torn apart
        with pytest.raises(UnsupportedError, match="in groups of 4"):
            step(engine, batch, weight)
        return
    for by in (0.0, 0.1, 0.1):
        move(net, by)
        plain = plain_copy(net)
        expected = plain(*cut.values())
        (expected * weight).sum().backward()
        assert_same(step(engine, batch, weight), expected.detach())
        assert_same(gradients(net), gradients(plain))
        with torch.no_grad():
            assert_same(engine.forward((), batch), plain_copy(net)(*batch.values()))
    assert engine.graphs.trained is not None
    assert not list(engine.graphs.trained.store)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.conv in SEEN_LATE], ids=lambda case: case.name
)
def test_p4_a_mean_over_all_nodes_is_a_step_old(case: ConvCase) -> None:
    batch = make_batch(case=case)
    cut, net, weight = cut_by_hand(batch), ConvNet(case, batch), torch.randn(N, D)
    engine = one_process_engine(net, partition=PARTITION, cross_edges="drop", chunk_order="fixed")
    oracle = StaleOracle(net, PARTITION)
    for by in (0.0, 0.1, 0.1):
        move(net, by)
        inputs = list(cut.values())
        expected = oracle.chunked(*inputs, order=ORDER) if by else oracle.exact(*inputs)
        (expected * weight).sum().backward()
        expected_grads = gradients(net)
        assert_same(step(engine, batch, weight), expected.detach())
        assert_same(gradients(net), expected_grads)


@pytest.mark.parametrize("method", METHODS)
def test_p4_no_rule_for_stale_rows_matters(method: str) -> None:
    batch, weight = make_batch(), torch.randn(N, D)
    net = ConvNet(ConvCase("GCNConv", lambda: gnn.GCNConv(D, D)), batch)
    engine = one_process_engine(
        net, partition=PARTITION, cross_edges="drop", method=METHODS[method]
    )
    for by in (0.0, 0.1, 0.1):
        move(net, by)
        expected = net(*cut_by_hand(batch).values())
        (expected * weight).sum().backward()
        expected_grads = gradients(net)
        assert_same(step(engine, batch, weight), expected.detach())
        assert_same(gradients(net), expected_grads)


def test_p4_features_of_dropped_edges_have_no_gradient() -> None:
    batch, weight = make_batch(), torch.randn(N, D)
    net = ConvNet(ConvCase("GATConv", lambda: gnn.GATConv(D, D, edge_dim=3), attributed), batch)
    cut = cut_by_hand(batch)
    cut["edge_attr"].requires_grad_()
    (net(*cut.values()) * weight).sum().backward()
    batch["edge_attr"].requires_grad_()
    engine = one_process_engine(net, partition=PARTITION, cross_edges="drop")
    step(engine, batch, weight)
    source, target = PARTITION[batch["edge_index"]]
    assert_same(batch["edge_attr"].grad[source == target], cut["edge_attr"].grad)
    assert not batch["edge_attr"].grad[source != target].any()


@pytest.mark.parametrize("norm", [gnn.BatchNorm, gnn.GraphNorm, gnn.PairNorm])
def test_p4_norms_are_over_all_nodes(norm: type[nn.Module]) -> None:
    """Not those of a chunk: exact in the first step, of the step before in those that follow."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = gnn.GCNConv(D, D), gnn.GCNConv(D, D)
            self.norm = norm() if norm is gnn.PairNorm else norm(D)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x, edge_index)), edge_index)

    net, weight = Net(), torch.randn(N, D)
    inputs = {name: make_batch()[name] for name in ("x", "edge_index")}
    engine = one_process_engine(net, partition=PARTITION, cross_edges="drop")
    for _ in range(3):  # weights stay, so that the last step's statistics are this one's
        expected = copy.deepcopy(net)(**cut_by_hand(inputs))
        assert_same(step(engine, inputs, weight), expected.detach())
