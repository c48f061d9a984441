"""The self-check runs layers without their random numbers, wherever these are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as gnn

from lightning_gnnpipe.selfcheck.trial import deterministic
from tests.batches.test_batches import on_engine, run
from tests.helpers.batches import NUM_FEATURES, SIZES, WIDTH, draw_batch

X = torch.randn(3, 5, 4)
OWN = torch.Generator()
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5)
ENCODER = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5)
LSTM, GRU = nn.LSTM(4, 4, 2, dropout=0.5), nn.GRU(4, 4, 2, dropout=0.5)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, None, 0.5),
    "attention, named": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "MultiheadAttention": lambda: ATTENTION(X, X, X)[0],
    "TransformerEncoderLayer": lambda: ENCODER(X),
    "LSTM": lambda: LSTM(X)[0],
    "GRU": lambda: GRU(X)[0],
    "a choice": lambda: torch.multinomial(X[0].exp(), 2) + 1.0,
    "gumbel": lambda: F.gumbel_softmax(X, hard=True),
    "exponential": lambda: torch.empty(4).exponential_(),
    "poisson": lambda: torch.poisson(X.exp()),
    "normal": lambda: torch.normal(0.0, 1.0, size=(4,)),
    "a generator": lambda: torch.randn(4, generator=OWN),
    "rrelu": lambda: F.rrelu(X, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_two_runs_are_the_same(name: str) -> None:
    draw = DRAWS[name]
    assert not torch.equal(draw(), draw())
    state = OWN.get_state()
    with deterministic():
        assert torch.equal(draw(), draw())
        assert draw().any()  # and hides nothing
        assert torch.equal(F.dropout(X, 0.3), X)
    assert torch.equal(OWN.get_state(), state)


class Attends(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], **given: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(NUM_FEATURES, WIDTH)
        self.convs = nn.ModuleList(make() for _ in range(2))
        self.given = given

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.lin(x)
        for conv in self.convs:
            x = conv(x, edge_index, batch) if self.given else conv(x, edge_index)
        return gnn.global_mean_pool(x, batch)


def gps(**attention: Any) -> gnn.GPSConv:
    local = gnn.SAGEConv(WIDTH, WIDTH)
    return gnn.GPSConv(WIDTH, local, heads=2, norm="layer_norm", attn_kwargs=attention, dropout=0.5)


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Attends(lambda: gps(dropout=0.5), takes_batch=True),
        lambda: Attends(lambda: gnn.TransformerConv(WIDTH, WIDTH, dropout=0.5)),
        lambda: Attends(lambda: gnn.GATv2Conv(WIDTH, WIDTH, dropout=0.5)),
    ],
    ids=["GPSConv", "TransformerConv", "GATv2Conv"],
)
def test_attention_with_dropout_trains_on_batches(
    make: Callable[[], nn.Module], num_chunks: int
) -> None:
    net = on_engine(make(), num_chunks)
    run(net, draw_batch(SIZES)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
