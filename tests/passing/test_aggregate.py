"""Fused aggregation: who takes it, its matrices against dense ones, and its kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.layers import find_layers, intercept
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.passing.aggregate import linear_rule
from lightning_gnnpipe.passing.sparse import KERNELS, Adjacency, Pattern, SparseRows, multiply
from lightning_gnnpipe.staleness import HistoryStore

N, D = 9, 4
ASSIGNMENT = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 1])
EDGES = torch.tensor([[0, 0, 1, 3, 5, 5, 6, 2, 7, 4, 1], [1, 1, 3, 3, 2, 0, 4, 7, 2, 6, 5]])


class Doubled(gnn.GCNConv):
    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return 2 * super().message(x_j, edge_weight)


class Named(gnn.GCNConv):
    """A subclass that changes nothing that matters."""


@pytest.mark.parametrize(
    ("make", "is_linear"),
    [
        (lambda: gnn.GCNConv(D, D), True),
        (lambda: Named(D, D), True),
        (lambda: gnn.SAGEConv(D, D), True),
        (lambda: gnn.GINConv(torch.nn.Linear(D, D)), True),
        (lambda: gnn.GCNConv(D, D, aggr="mean"), True),
        (lambda: Doubled(D, D), False),
        (lambda: gnn.SAGEConv(D, D, aggr="max"), False),
        (lambda: gnn.SAGEConv(D, D, aggr=["mean", "sum"]), False),
        (lambda: gnn.GATConv(D, D), False),
        (lambda: gnn.ARMAConv(D, D), False),  # its rows are in the second dimension
        (lambda: gnn.WLConvContinuous(), False),
    ],
)
def test_sums_of_constant_multiples_are_linear(
    make: Callable[[], MessagePassing], is_linear: bool
) -> None:
    assert (linear_rule(make()) is not None) == is_linear


class Propagates(gnn.SAGEConv):
    def propagate(self, *args: object, **kwargs: object) -> Tensor:
        return 2 * super().propagate(*args, **kwargs)


def test_a_layer_with_a_propagate_of_its_own_keeps_it() -> None:
    assert linear_rule(Propagates(D, D)) is None
    conv = gnn.SAGEConv(D, D)
    conv.aggr_module.register_forward_hook(lambda *_: None)
    assert linear_rule(conv) is None


def test_a_hooked_layer_keeps_its_messages() -> None:
    conv = gnn.GCNConv(D, D)
    handle = conv.register_message_forward_hook(lambda *_: None)
    assert linear_rule(conv) is None
    handle.remove()
    assert linear_rule(conv) is not None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_rows_and_columns_are_those_of_the_matrix(
    weighted: bool, is_mean: bool, scale: float
) -> None:
    plan = plan_from_assignment(EDGES, N, ASSIGNMENT)
    edges = plan.whole.chunks[0].edge_index
    owner = plan.chunk_of_position()
    values = torch.rand(edges.size(1), dtype=torch.float64) if weighted else None
    dense = torch.zeros(N, N, dtype=torch.float64)
    entries = torch.ones(edges.size(1), dtype=torch.float64) if values is None else values
    dense.index_put_((edges[1], edges[0]), entries, accumulate=True)
    if is_mean:
        dense /= torch.bincount(edges[1], minlength=N).clamp(min=1).unsqueeze(1)
    factor = torch.where(owner[:, None] == owner[None, :], 1.0, scale)
    adjacency = Adjacency(Pattern(edges, N, owner), values, is_mean=is_mean)
    table = torch.randn(N, D, dtype=torch.float64)
    for chunk in plan.chunks:
        own = slice(chunk.start, chunk.end)
        found = multiply(adjacency.rows(chunk, torch.float64), table)
        torch.testing.assert_close(found, dense[own] @ table, rtol=1e-12, atol=1e-12)
        found = multiply(adjacency.columns(chunk, torch.float64, scale), table)
        expected = (dense * factor).T[own] @ table
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_product_is_that_of_the_dense_matrix(dtype: torch.dtype, weighted: bool) -> None:
    offsets, indices = torch.tensor([0, 0, 2, 5], dtype=torch.int32), torch.tensor([1, 3, 0, 1, 2])
    values = torch.rand(5, dtype=dtype) if weighted else None
    table = torch.randn(4, D, dtype=dtype)
    dense = torch.zeros(3, 4, dtype=dtype)
    dense[[1, 1, 2, 2, 2], indices] = torch.ones(5, dtype=dtype) if values is None else values
    found = multiply(SparseRows(offsets, indices.int(), values), table)
    torch.testing.assert_close(found, (dense.double() @ table.double()).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert multiply(SparseRows(offsets, indices.int(), values), table).equal(found)
    if dtype in (torch.float32, torch.float64):  # torch's CSR has no half precision on the CPU
        for kernel in KERNELS:
            other = multiply(SparseRows(offsets, indices.int(), values), table, kernel)
            torch.testing.assert_close(other, found)


def test_no_message_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer on the batch's own edges never calls `message`; one with learned weights does."""
    called: list[int] = []

    def message(self: object, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        called.append(1)
        return x_j * edge_weight.view(-1, 1)

    plan = plan_from_assignment(EDGES, N, ASSIGNMENT)
    context = MessageContext(HistoryStore(N, plan.num_chunks), plan)
    conv = gnn.GCNConv(D, D)
    with intercept(find_layers(conv), context):
        monkeypatch.setattr(conv, "message", message.__get__(conv), raising=False)
        for chunk in (*plan.whole.chunks, *plan.chunks):
            context.enter(chunk, 0)
            conv(torch.randn(chunk.num_nodes, D), chunk.edge_index)
        assert not called
        context.enter(plan.whole.chunks[0], 0)
        learned = torch.rand(EDGES.size(1), requires_grad=True)
        conv(torch.randn(N, D), plan.whole.chunks[0].edge_index, learned)
    assert called


def test_no_message_of_one_of_two_edge_sets_is_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[int] = []

    def message(self: object, x_j: Tensor) -> Tensor:
        called.append(1)
        return x_j

    plan = plan_from_assignment(EDGES, N, ASSIGNMENT).with_edge_sets((7, 4))
    context = MessageContext(HistoryStore(N, plan.num_chunks), plan)
    conv = gnn.SignedConv(D, D, first_aggr=True)
    sets = [plan.edge_set(number) for number in range(2)]
    with intercept(find_layers(conv), context):
        monkeypatch.setattr(conv, "message", message.__get__(conv), raising=False)
        context.enter(plan.whole.chunks[0], 0)
        conv(torch.randn(N, D), *(edges.whole.chunks[0].edge_index for edges in sets))
        for chunk in plan.chunks:
            context.enter(chunk, 0)
            own = [edges.chunks[chunk.index].edge_index for edges in sets]
            conv(torch.randn(chunk.num_nodes, D), *own)
        assert not called
        context.enter(chunk, 0)
        conv(torch.randn(chunk.num_nodes, D), own[0].clone(), own[1])
    assert called
