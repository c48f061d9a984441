"""Fused aggregation: which layers take it. That it writes no messages, `test_card.py` counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.passing.aggregate import linear_rule

D = 4


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
