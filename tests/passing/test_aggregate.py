"""Fused aggregation: who takes it, and that it writes no messages."""

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
from lightning_gnnpipe.staleness import HistoryStore

N, D = 9, 4
ASSIGNMENT = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 1])
EDGES = torch.tensor([[0, 0, 1, 3, 5, 5, 6, 2, 7, 4, 1], [1, 1, 3, 3, 2, 0, 4, 7, 2, 6, 5]])


class Doubled(gnn.GCNConv):
    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return 2 * super().message(x_j, edge_weight)


class Named(gnn.GCNConv):
    """A subclass that changes nothing that matters."""


class Propagates(gnn.SAGEConv):
    def propagate(self, *args: object, **kwargs: object) -> Tensor:
        return 2 * super().propagate(*args, **kwargs)


def hooked() -> MessagePassing:
    conv = gnn.SAGEConv(D, D)
    conv.aggr_module.register_forward_hook(lambda *_: None)
    return conv


@pytest.mark.parametrize(
    ("make", "is_linear"),
    [
        (lambda: gnn.GCNConv(D, D), True),
        (lambda: Named(D, D), True),
        (lambda: gnn.SAGEConv(D, D), True),
        (lambda: gnn.GINConv(torch.nn.Linear(D, D)), True),
        (lambda: gnn.GCNConv(D, D, aggr="mean"), True),
        (lambda: Doubled(D, D), False),
        (lambda: Propagates(D, D), False),
        (hooked, False),
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
    conv = make()
    assert (linear_rule(conv) is not None) == is_linear
    handle = conv.register_message_forward_hook(lambda *_: None)
    assert linear_rule(conv) is None
    handle.remove()
    assert (linear_rule(conv) is not None) == is_linear


@pytest.mark.parametrize("sizes", [(11,), (7, 4)])
def test_no_message_is_written_down(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With learned weights, or edges that are not the batch's, there are some."""
    called: list[int] = []

    def message(self: object, x_j: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        called.append(1)
        return x_j

    plan = plan_from_assignment(EDGES, N, ASSIGNMENT)
    if len(sizes) == 1:
        conv, plans = gnn.GCNConv(D, D), [plan]
    else:
        plan, conv = plan.with_edge_sets(sizes), gnn.SignedConv(D, D, first_aggr=True)
        plans = [plan.edge_set(number) for number in range(2)]
    context = MessageContext(HistoryStore(N, plan.num_chunks), plan)
    with intercept(find_layers(conv), context):
        monkeypatch.setattr(conv, "message", message.__get__(conv), raising=False)
        for number, chunk in enumerate((*plan.whole.chunks, *plan.chunks)):
            context.enter(chunk, 0)
            chunks = [[*one.whole.chunks, *one.chunks][number] for one in plans]
            conv(torch.randn(chunk.num_nodes, D), *(one.edge_index for one in chunks))
        assert not called
        if len(sizes) == 1:
            context.enter(plan.whole.chunks[0], 0)
            learned = torch.rand(11, requires_grad=True)
            conv(torch.randn(N, D), plan.whole.chunks[0].edge_index, learned)
        else:
            context.enter(chunk, 0)
            own, other = (one.edge_index for one in chunks)
            conv(torch.randn(chunk.num_nodes, D), own.clone(), other)
    context.leave()
    assert called
