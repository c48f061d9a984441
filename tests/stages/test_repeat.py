"""Which values stages can compute again, and which they do; `promises/test_repeat.py` trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.layers import find_layers
from lightning_gnnpipe.stages import (
    Layers,
    choose_repeated,
    cut_module,
    find_users,
    split_layers,
)
from tests.helpers.encoders import ENCODED_NETS, Encoded, Two
from tests.helpers.graphs import communities

CASE = communities(3)


def layers_of(module: nn.Module, x: Tensor = CASE.data.x) -> Layers:
    call = flatten_call(module.double(), (x, CASE.data.edge_index), {})
    return cut_module(module, call, classify(call), find_layers(module).all)


class Skips(Encoded):
    """Only the last layer reads the encoder."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h, x_0 = self.encode(x)
        for conv in self.convs:
            h = self.act(conv(h, h, edge_index))
        return self.lin_out(h + x_0)


def test_what_is_repeated_is_handed_on_by_no_layer() -> None:
    module = Skips()
    layers = layers_of(module)
    stages = split_layers(layers, (1, 1, 1, 1), list(layers.repeatable))
    assert [len(stage.repeated) for stage in stages] == [0, 0, 0, 1]
    users = find_users(stages, module)
    assert users["lin_in.weight"] == users["lin_in.bias"] == {0, 3}


def test_auto_takes_what_spares_bytes_and_is_cheap() -> None:
    def chosen(option: bool | str, rows: int, *, wide: int = 5, shards: int = 1) -> bool:
        module = Encoded()
        module.lin_in = nn.Linear(wide, 6)
        layers = layers_of(module, x=torch.zeros(24, wide, dtype=torch.float64))
        return bool(choose_repeated(layers, option, lambda *_: rows, shards))

    # 6 numbers a row against 36 weights, both twice
    assert [chosen("auto", rows) for rows in (6, 7)] == [False, True]
    assert [chosen("auto", rows, shards=2) for rows in (12, 13)] == [False, True]
    assert chosen(True, 1) and not chosen(False, 10**6)
    # 128 weights for each of 48 bytes
    assert [chosen("auto", 10**6, wide=wide) for wide in (1023, 1024)] == [True, False]
    assert chosen(True, 10**6, wide=1024)


def test_a_weight_counts_for_the_first_value_that_uses_it_and_if_it_is_trained() -> None:
    layers = layers_of(Two())
    x_0, y_0, z_0 = layers.repeatable
    # y_0 adds 42 weights to the 36 of x_0; z_0 has 36 of its own
    assert choose_repeated(layers, "auto", lambda *_: 8, 1) == (x_0, y_0, z_0)
    assert choose_repeated(layers, "auto", lambda *_: 7, 1) == (x_0, z_0)
    assert choose_repeated(layers_of(ENCODED_NETS["frozen"](0.0)), "auto", lambda *_: 1, 8)


class Odd(nn.Module):
    """Has another encoder."""

    encode: Callable[[Any, Tensor, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 6)
        self.conv_in = gnn.SAGEConv(5, 6)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
        self.embedding = nn.Embedding(7, 6, sparse=True)
        self.whole = gnn.LayerNorm(6)  # over all nodes
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.convs = nn.ModuleList(gnn.SAGEConv(6, 6) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x_0 = self.encode(x, edge_index)
        for conv in self.convs:
            h = conv(h, edge_index).relu() + x_0
        return h


def number(x: Tensor) -> Tensor:
    return (x[:, 0].abs() * 6).long()


def doubled_leaf(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    hidden = x.clone()
    hidden.mul_(2)  # not an ancestor of what reads `hidden`
    return net.lin(hidden)


def doubled_view(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    hidden = net.lin(x)
    hidden.view(-1).mul_(2)
    return hidden


def doubled_data(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    hidden = net.lin(x)
    hidden.data.mul_(2)
    return hidden


@pytest.mark.parametrize(
    ("encode", "is_repeatable"),
    [
        (lambda net, x, edge_index: net.conv_in(x, edge_index), False),
        (lambda net, x, _: net.spectral(x), False),
        (lambda net, x, _: net.embedding(number(x)), False),
        (lambda net, x, _: F.embedding(number(x), net.embedding.weight, sparse=True), False),
        (lambda net, x, _: net.whole(net.lin(x)), False),
        (doubled_leaf, False),
        (doubled_view, False),
        (doubled_data, False),
        (lambda net, x, _: net.lin(x.mul_(2)), True),
        (lambda net, x, _: net.lstm(x.unsqueeze(1))[0][:, -1], True),
        (lambda net, x, _: F.normalize(x @ net.lin.weight.t() * net.lin.bias.softmax(0)), True),
        (lambda net, x, _: F.one_hot(number(x), 6).to(x.dtype), True),
    ],
)
def test_only_plain_functions_of_rows_are_repeatable(encode: Any, is_repeatable: bool) -> None:
    net = type("Encodes", (Odd,), {"encode": encode})()
    assert bool(layers_of(net).repeatable) == is_repeatable
