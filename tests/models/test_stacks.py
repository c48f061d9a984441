"""The reference stacks: their formulas, shapes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.models import GCNII, GNN, ResGCNPlus

STACKS = [
    GNN,
    partial(GNN, conv="sage", norm="layer", input_dropout=0.3),
    partial(GNN, conv="gat", norm="layer", skip=True),
    GCNII,
    ResGCNPlus,
    partial(ResGCNPlus, norm="batch"),
]
NUM_NODES = 6


@pytest.fixture
def graph() -> tuple[Tensor, Tensor]:
    """0 - 1 - 2 - 3 - 4 in both directions, and node 5 alone."""
    path = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    x = torch.randn(NUM_NODES, 3, generator=torch.Generator().manual_seed(0))
    return x.double(), torch.cat([path, path.flip(0)], dim=1)


def build(stack: Callable[..., nn.Module], num_layers: int = 4, **kwargs: float) -> nn.Module:
    torch.manual_seed(0)
    return stack(3, 8, 2, num_layers, **kwargs).double()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(GNN, 3, 8, 2, 0), r"'num_layers' to be at least 1 \(got 0\)"),
        (partial(GCNII, 3, 8, 2, 0), r"'num_layers' to be at least 1 \(got 0\)"),
        (partial(GNN, 3, 8, 2, 4, norm="layr"), r"'batch', 'layer', None \(got 'layr'\)"),
        (partial(GNN, 3, 8, 2, 4, conv="sagee"), r"'gcn', 'sage', 'gat' \(got 'sagee'\)"),
    ],
)
def test_options_of_no_meaning_are_refused(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("num_layers", [1, 4])
def test_layers_are_counted_and_all_parameters_get_a_gradient(stack, num_layers, graph):
    net = build(stack, num_layers)
    out = net(*graph)
    assert out.shape == (NUM_NODES, 2)
    assert len([m for m in net.modules() if isinstance(m, MessagePassing)]) == num_layers
    out.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert all(conv.training for conv in net.convs)


@pytest.mark.parametrize("stack", STACKS)
def test_a_node_is_changed_only_by_nodes_within_num_layers_hops(stack, graph):
    """Node 4 is two hops from node 2 and four from node 0: two layers see the one, not the other.

    A norm over all nodes, such as LayerNorm(mode="graph"), would fail here.
    """
    x, edge_index = graph
    net = build(stack, num_layers=2).eval()
    moved = x.clone()
    moved[4] += 1.0
    change = (net(moved, edge_index) - net(x, edge_index)).abs().amax(dim=1)
    assert (change[[2, 3, 4]] > 1e-6).all()
    assert (change[[0, 1, 5]] == 0).all()


def propagation(edge_index: Tensor) -> Tensor:
    """Return D^-1/2 (A + I) D^-1/2, written out densely."""
    adjacency = torch.eye(NUM_NODES, dtype=torch.float64)
    adjacency[edge_index[1], edge_index[0]] = 1
    scale = adjacency.sum(dim=1).rsqrt()
    return scale[:, None] * adjacency * scale


def test_gnn_without_skips_is_the_formula_of_kipf_and_welling(graph):
    x, matrix = graph[0], propagation(graph[1])
    net = build(GNN, num_layers=2).eval()
    first, last = net.convs
    h = (matrix @ x @ first.lin.weight.t() + first.bias).relu()
    out = matrix @ h @ last.lin.weight.t() + last.bias
    torch.testing.assert_close(net(*graph), out, rtol=1e-12, atol=1e-12)


def test_gnn_with_skips_is_the_formula_of_luo_et_al(graph):
    """relu(norm(conv(X) + skip(X))) for each layer, and a linear map."""
    x, matrix = graph[0], propagation(graph[1])
    net = build(GNN, num_layers=2, dropout=0.0, norm="batch", skip=True)
    out = net(*graph)
    for conv, skip in zip(net.convs, net.skips, strict=True):
        x = matrix @ x @ conv.lin.weight.t() + conv.bias + skip(x)
        x = ((x - x.mean(dim=0)) / (x.var(dim=0, correction=0) + 1e-5).sqrt()).relu()
    torch.testing.assert_close(out, net.lin_out(x), rtol=1e-10, atol=1e-10)


def test_gcnii_layer_is_the_formula_of_the_paper(graph):
    """One layer written out densely: relu(((1-a) P X + a X0) ((1-b) I + b W))."""
    net = build(GCNII, num_layers=2, alpha=0.2, theta=0.7).eval()
    h = h_0 = net.lin_in(graph[0]).relu()
    for layer, conv in enumerate(net.convs, start=1):
        beta = torch.tensor(0.7 / layer + 1, dtype=torch.float64).log()
        mixed = 0.8 * propagation(graph[1]) @ h + 0.2 * h_0
        h = ((1 - beta) * mixed + beta * mixed @ conv.weight1).relu()
    torch.testing.assert_close(net(*graph), net.lin_out(h), rtol=1e-12, atol=1e-12)
