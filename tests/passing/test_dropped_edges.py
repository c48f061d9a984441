"""P4 without edges between chunks: every layer equals PyG on the graph that was cut by hand."""

from __future__ import annotations

import copy
from itertools import cycle

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.layers import find_convs
from tests.helpers.cases import name_of
from tests.helpers.convs import CASES, ConvCase, ConvNet, D, attributed
from tests.helpers.engines import one_process_engine
from tests.passing.test_convs import (
    OWN,
    PARTITION,
    assert_same,
    assert_step,
    make_batch,
    move,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:We do not recommend using the non-optimized CPU"),
    pytest.mark.usefixtures("double"),
]


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


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("case", "recompute"), zip([*CASES, *OWN], cycle([False, True]), strict=False), ids=name_of
)
def test_p4_conv_equals_pyg_on_the_cut_graph(case: ConvCase, recompute: bool) -> None:
    """From the first step on, with weights that move; and on the whole graph in between."""
    batch = make_batch(case=case)
    net = ConvNet(case, batch)
    engine = one_process_engine(net, partition=PARTITION, cross_edges="drop", recompute=recompute)
    for by in (0.0, 0.1, 0.1):
        move(net, by)
        plain = plain_copy(net)
        assert_step(engine, batch, net, plain(*cut_by_hand(batch).values()), plain)
        with torch.no_grad():
            assert_same(engine.forward((), batch), plain_copy(net)(*batch.values()))
    assert engine.graphs.trained is not None
    assert not list(engine.graphs.trained.store)


def test_p4_features_of_dropped_edges_have_no_gradient() -> None:
    batch = make_batch()
    net = ConvNet(ConvCase("GATConv", lambda: gnn.GATConv(D, D, edge_dim=3), attributed), batch)
    cut = cut_by_hand(batch)
    cut["edge_attr"].requires_grad_()
    batch["edge_attr"].requires_grad_()
    engine = one_process_engine(net, partition=PARTITION, cross_edges="drop")
    assert_step(engine, batch, net, net(*cut.values()))
    source, target = PARTITION[batch["edge_index"]]
    assert_same(batch["edge_attr"].grad[source == target], cut["edge_attr"].grad)
    assert not batch["edge_attr"].grad[source != target].any()


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("norm", [gnn.BatchNorm(D), gnn.GraphNorm(D), gnn.PairNorm()])
def test_p4_norms_are_over_all_nodes(norm: nn.Module) -> None:
    """Not those of a chunk: exact in the first step, of the step before in those that follow."""

    first, last = ((gnn.GCNConv(D, D), "x, edge_index -> x") for _ in range(2))
    net = gnn.Sequential("x, edge_index", [first, (norm.double(), "x -> x"), last])
    inputs = {name: make_batch()[name] for name in ("x", "edge_index")}
    engine = one_process_engine(net, partition=PARTITION, cross_edges="drop")
    for step in range(3):  # weights stay, so that the last step's statistics are this one's
        engine.set_step(step_index=step)
        expected = copy.deepcopy(net)(**cut_by_hand(inputs))
        found = engine.forward((), inputs)
        assert_same(found.detach(), expected.detach())
        found.square().sum().backward()
