"""Tensors that a module reads beside its arguments: tables of weights, data that it holds.

The oracle calls an inner module with the same tensors as arguments, which other tests compare with
oracles of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.alike import (
    D,
    Fits,
    N,
    assert_alike,
    by_name,
    fit,
    graph,
    net_of,
)
from tests.helpers.cases import slow
from tests.helpers.trainers import quiet_trainer, weights

GRAPH = graph()
NUM_EDGES = GRAPH.edge_index.size(1)
KINDS = 3
W = 6


class Layers(nn.Module):
    """Three layers, skips from what comes in, and a linear layer before each."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.GraphConv(D, D) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        h = x
        for conv in self.convs:
            h = conv(h, edge_index, edge_weight).tanh() + x
        return h


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layers()


class OwnBuffers(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", GRAPH.x.clone())
        self.register_buffer("edge_index", GRAPH.edge_index)

    def forward(self) -> Tensor:
        return self.inner(self.x, self.edge_index)


class EdgesOfModes(Holds):
    """Trains on some edges and is evaluated on all, as link prediction does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edge_index", GRAPH.edge_index)
        self.register_buffer("some_edge_index", GRAPH.edge_index[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.some_edge_index if self.training else self.edge_index)


def table(**options: Any) -> nn.Module:
    return nn.Embedding(N, D, **options)


def random_rows(num_rows: int = N, *shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.rand(num_rows, *shape))


def light_gcn(net: Any, edge_index: Tensor) -> Tensor:
    x, total = net.emb.weight, net.emb.weight / 4
    for conv in net.convs:
        x = conv(x, edge_index)
        total = total + x / 4
    return total


call = by_name(
    y=lambda _: torch.arange(N) % 4,
    mask=lambda _: torch.arange(N) % 3 == 0,
    ids=lambda _: torch.arange(N) * 7 % N,
    one_hot=lambda _: torch.eye(N),
    a_edge_index=lambda data: data.edge_index,
    b_edge_index=lambda data: data.edge_index * 7 % N,
)
held = partial(net_of, Holds)
Table = held(lambda net, edge_index: net.inner(net.emb.weight, edge_index), emb=table)
# A parameter beside features; the layer before changes all rows.
Rows = held(lambda net, x, edge_index: net.inner(x + net.rows, edge_index), rows=random_rows(N, D))

NETS: dict[str, type[nn.Module]] = {
    "a table": Table,
    "buffers": OwnBuffers,
    "a weight an edge": held(
        lambda net, x, edge_index: net.inner(x, edge_index, net.weight.sigmoid()),
        weight=random_rows(NUM_EDGES),
    ),
}
MORE: dict[str, type[nn.Module]] = {
    "edges of each mode": EdgesOfModes,
    "rows beside features": Rows,
    "LightGCN": net_of(
        nn.Module,
        light_gcn,
        emb=table,
        convs=lambda: nn.ModuleList([gnn.LGConv() for _ in range(3)]),
    ),
    # The head reads the table again, on every rank.
    "a table in the head": held(
        lambda net, edge_index: (net.inner(net.emb.weight, edge_index) @ net.emb.weight.t()).mean(
            -1
        ),
        emb=table,
    ),
    # As a leaf, and through the embedding.
    "a table and its rows": held(
        lambda net, ids, edge_index: net.inner(net.emb.weight + net.emb(ids), edge_index), emb=table
    ),
    # A weight for features that are the numbers of nodes.
    "as many features as nodes": held(
        lambda net, one_hot, edge_index: net.inner(
            torch.addmm(net.bias, one_hot, net.weight), edge_index
        ),
        weight=random_rows(N, D),
        bias=random_rows(D),
    ),
    # It is not clear to which edges the buffer belongs, and forward does not read it.
    "edges of two kinds": held(
        lambda net, x, a_edge_index, b_edge_index: (
            net.inner(x, a_edge_index) + net.inner(x, b_edge_index)
        ),
        row=lambda: nn.Buffer(GRAPH.edge_index[0]),
    ),
}


@pytest.mark.some_cases(1)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [*NETS, *MORE])
def test_what_a_module_holds_trains_as_plainly(name: str) -> None:
    assert_alike((NETS | MORE)[name], call, pipelined_module="net")


def difference(one: Fits, other: Fits) -> float:
    return float((weights(one) - weights(other)).abs().max())


@pytest.mark.some_cases(2)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", NETS)
def test_in_chunks_it_counts_as_arguments(name: str) -> None:
    options = {"num_chunks": 3, "staleness": "constant"}
    found = fit(NETS[name], call, pipelined_module="net", **options)
    oracle = fit(NETS[name], call, pipelined_module="net.inner", **options)
    assert difference(found, oracle) < 1e-10


PLACES: dict[str, dict[str, Any]] = {"two stages": {}, "two shards": {"graph_parallel": 2}}


@pytest.mark.some_cases(1)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name",
    [
        "a table",
        "a weight an edge",
        slow("LightGCN"),
        "a table in the head",
        "a table and its rows",
    ],
)
def test_on_two_ranks_it_trains_as_on_one(name: str, place: str) -> None:
    options = {"num_chunks": 2 if place == "two stages" else 1, "pipelined_module": "net"}
    alone = fit((NETS | MORE)[name], call, **options)
    both = fit((NETS | MORE)[name], call, num_stages=2, **options, **PLACES[place])
    assert difference(both, alone) < 1e-10


def train(
    kind: type[Fits],
    make: Callable[[], nn.Module],
    num_chunks: int,
    num_stages: int = 1,
    loaders: Any = None,
) -> Fits:
    """Train a module of this kind for 4 epochs; 0 chunks is plain Lightning."""
    torch.manual_seed(0)
    module = kind(make().double(), call)
    own = DataLoader([graph()], batch_size=None)
    piped = {"num_chunks": num_chunks, "pipelined_module": "net"} if num_chunks else None
    trainer = quiet_trainer(num_stages, piped, max_epochs=4, num_sanity_val_steps=1)
    trainer.fit(module, own, own if loaders is None else loaders)
    return module


def changing(change: Callable[[Any, int], Any]) -> type[Fits]:
    """Return a module whose hook changes the net in each epoch."""

    class Changes(Fits):
        def on_train_epoch_start(self) -> None:
            change(self.net, self.current_epoch)

    return Changes


class Sparse(Fits):
    """Has an optimizer for sparse gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


OUTSIDE: dict[str, tuple[type[Fits], type[nn.Module]]] = {
    # As an argument that changes does: the step on new features is exact.
    "a buffer changes": (changing(lambda net, epoch: epoch == 2 and net.x.add_(1.0)), OwnBuffers),
    "a sparse table": (
        Sparse,
        held(
            lambda net, ids, edge_index: net.inner(net.emb(ids), edge_index),
            emb=lambda: table(sparse=True),
        ),
    ),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OUTSIDE)
def test_changes_from_outside_count(name: str) -> None:
    plain, exact = (train(*OUTSIDE[name], num_chunks) for num_chunks in (0, 1))
    assert difference(exact, plain) < 1e-9
    assert difference(train(*OUTSIDE[name], 3), plain) < 0.5


@pytest.mark.usefixtures("double")
def test_a_table_that_another_stage_holds_is_thawed() -> None:
    kind = changing(lambda net, epoch: net.emb.weight.requires_grad_(epoch > 0))
    both = train(kind, Table, num_chunks=1, num_stages=2)
    assert difference(both, train(kind, Table, num_chunks=0)) < 1e-9
