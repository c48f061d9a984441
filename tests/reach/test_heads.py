"""What follows the last message-passing layer and mixes rows: decoders, readouts, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages import cut, cut_module, trace
from tests.helpers.alike import D, Forward, N, assert_alike, fit, graph, on_features

W = 8


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.SAGEConv(D, W), gnn.SAGEConv(W, W), gnn.SAGEConv(W, W)])

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


class DecodesPairs(Encodes):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(
            nn.Linear(2 * W, W, bias=False), nn.BatchNorm1d(W), nn.Linear(W, 1)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:
        z = self.encode(x, edge_index)
        source, target = edge_label_index
        return self.score(torch.cat([z[source], z[target]], dim=-1)).squeeze(-1)


class TakesData(Encodes):
    def forward(self, data: Data) -> Tensor:
        z = self.encode(data.x, data.edge_index)
        return (z[data.edge_label_index[0]] * z[data.edge_label_index[1]]).sum(-1)


class DecodesEdges(Encodes):
    """Rows of edges, of nodes and of pairs of edge features, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.of_edges = nn.Linear(3, W)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Tensor]:
        z = self.encode(x, edge_index)
        src, dst = edge_index
        return {"edges": z[src] * z[dst] + self.of_edges(edge_attr), "nodes": z}


class TransformsEdges(Encodes):
    """Features of edges, changed by themselves, are an output with rows of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.of_edges = nn.Linear(3, W)
        self.last = gnn.GINEConv(nn.Linear(W, W), edge_dim=W)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        edges = self.of_edges(edge_attr).tanh()
        z = self.last(self.encode(x, edge_index), edge_index, edges)
        return z, edges.square()


class Reconstructs(Encodes):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        z = self.encode(x, edge_index)
        return torch.sigmoid(z @ z.t())


class Selects(Encodes):
    def forward(self, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
        return self.encode(x, edge_index)[mask]


class Reads(Encodes):
    """A readout over the graph, and layers behind it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        pools = {
            "attention": lambda: gnn.aggr.AttentionalAggregation(nn.Linear(W, 1)),
            "Set2Set": lambda: gnn.aggr.Set2Set(W, processing_steps=2),
            "median": gnn.aggr.MedianAggregation,
        }
        self.pool = pools[how]() if how in pools else None
        self.out = nn.Linear(2 * W if how == "Set2Set" else W, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        z = self.encode(x, edge_index)
        if self.pool is not None:
            pooled = self.pool(z, torch.zeros_like(z[:, 0], dtype=torch.long))
        elif self.how == "mean of PyG":
            pooled = gnn.global_mean_pool(z, None)
        elif self.how == "max":
            pooled = z.max(dim=0).values[None]
        elif self.how == "with nodes":
            return self.out(z), self.out(z.mean(0))
        elif self.how == "beside each node":
            return self.out(z + z.mean(dim=0, keepdim=True))
        elif self.how == "norm by hand":
            return self.out((z - z.mean(0)) / (z.std(0) + 1e-2))
        else:
            pooled = z.sum(0, keepdim=True) / z.size(0)
        return self.out(pooled)


class ReadsEachLayer(Encodes):
    """A readout of each layer, in the order of the layers."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            found.append(gnn.global_add_pool(x, None))
        return torch.cat(found, dim=-1)


class Attends(nn.Module):
    def __init__(self, kind: str = "Transformer") -> None:
        super().__init__()
        loops = {"GAT": {"add_self_loops": False}}.get(kind, {})
        make: Any = {"GAT": gnn.GATConv, "Transformer": gnn.TransformerConv, "loops": gnn.GATConv}
        self.first, self.last = make[kind](D, 4, heads=2, **loops), make[kind](W, W, **loops)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x, (edges, first) = self.first(x, edge_index, return_attention_weights=True)
        out, last = self.last(x.tanh(), edge_index, return_attention_weights=True)
        return out, edges, first, last


class AttendsLast(Attends):
    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.first(x, edge_index).tanh()
        return self.last(x, edge_index, return_attention_weights=True)


def with_pairs(net: Any, data: Data) -> Any:
    return net(data.x, data.edge_index, data.pairs)


def with_attributes(net: Any, data: Data) -> Any:
    return net(data.x, data.edge_index, data.edge_attr)


def with_loops(net: Any, data: Data) -> Any:
    return net(data.x, torch.cat([data.edge_index, torch.tensor([[3, 9], [3, 9]])], dim=1))


def with_mask(net: Any, data: Data) -> Any:
    return net(data.x, data.edge_index, data.x[:, 0] > 0)


def with_data(net: Any, data: Data) -> Any:
    return net(Data(x=data.x, edge_index=data.edge_index, edge_label_index=data.pairs))


READOUTS = ("mean of PyG", "max", "mean", "with nodes", "beside each node", "norm by hand")
NETS: dict[str, tuple[Callable[[], nn.Module], Forward, int]] = {
    "pairs": (DecodesPairs, with_pairs, 3),
    "pairs of data": (TakesData, with_data, 3),
    "edges": (DecodesEdges, with_attributes, 3),
    "edges alone": (TransformsEdges, with_attributes, 4),
    "reconstructs": (Reconstructs, on_features, 3),
    "selects": (Selects, with_mask, 3),
    **{how: (lambda how=how: Reads(how), on_features, 3) for how in READOUTS},
    "attention": (lambda: Reads("attention"), on_features, 3),
    "Set2Set": (lambda: Reads("Set2Set"), on_features, 3),
    "each layer": (ReadsEachLayer, on_features, 3),
    "median": (lambda: Reads("median"), on_features, 3),
    "attention weights": (Attends, on_features, 2),
    "attention weights of GAT": (lambda: Attends("GAT"), on_features, 2),
    "attention weights of the last": (AttendsLast, on_features, 2),
    "attention weights with loops": (lambda: Attends("loops"), with_loops, 2),
    "attention weights of the last with loops": (lambda: AttendsLast("loops"), with_loops, 2),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", NETS)
def test_heads_train_as_plainly(name: str) -> None:
    make, call, _ = NETS[name]
    assert_alike(make, call)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["pairs", "Set2Set", "attention weights"])
def test_heads_train_in_two_stages(name: str) -> None:
    make, call, _ = NETS[name]
    assert_alike(make, call, num_stages=2)


def test_shards_return_rows_of_edges() -> None:
    make, call, _ = NETS["edges alone"]
    assert_alike(make, call, num_stages=2, graph_parallel=2)


def test_pairs_drawn_anew_each_step_leave_rows_and_traces_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes, traced = iter(range(20, 60)), list[bool]()

    def traces(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traced.append(module.training)
        return trace(module, *args, **kwargs)

    def draw(net: Any, data: Data) -> Any:
        return net(data.x, data.edge_index, torch.randint(N, (2, next(sizes))))

    monkeypatch.setattr(cut, "trace", traces)
    fit(DecodesPairs, draw, num_chunks=3)
    assert traced == [True, False]
    assert not [one for one in caplog.records if "exact" in one.message]


def test_the_head_draws_alike_on_all_ranks() -> None:
    """Dropout behind the readout: one loss on all ranks, and the same with one stage."""

    class Drops(Encodes):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(W, 64)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.drop(self.out(self.encode(x, edge_index).mean(0, keepdim=True)))

    one, two = (fit(Drops, num_chunks=3, num_stages=stages) for stages in (1, 2))
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


class PoolsBetween(Encodes):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index)
        x = x + self.pool(x, torch.zeros_like(x[:, 0], dtype=torch.long))
        return self.convs[1](x, edge_index)


class SelectsBetween(Encodes):
    def __init__(self) -> None:
        super().__init__()
        self.pool = gnn.TopKPooling(W, ratio=0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index)
        x, edge_index, *_ = self.pool(x, edge_index)
        return self.convs[1](x, edge_index).mean(0)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a pool between layers": (
        lambda: PoolsBetween(gnn.aggr.MeanAggregation()),
        "'pool', a MeanAggregation: it pools over the whole graph.*behind the last",
    ),
    "top-k pooling": (
        SelectsBetween,
        "TopKPooling: it chooses the nodes of later layers among all",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_between_layers_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(UnsupportedError, match=text):
        fit(make, num_chunks=3)


def test_the_head_is_as_late_and_as_small_as_it_can_be() -> None:
    """The linear layer runs in the last stage; what all ranks get is its few columns."""

    class Narrows(Encodes):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(W, 2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.out(self.encode(x, edge_index)).mean(0)

    data, net = graph(), Narrows().double()
    call = flatten_call(net, (data.x, data.edge_index), {})
    layers = cut_module(net, call, classify(call))
    assert [layers.values[name].row_shape for name in layers.outputs] == [(2,)]
    assert layers.head is not None and not list(layers.head.module.parameters())


HABITS = {
    "a decoder of `edge_label_index`, or of all pairs, in `forward`": (
        "as plainly; each device decodes all pairs",
        test_heads_train_as_plainly,
        *("pairs", "pairs of data", "reconstructs"),
    ),
    "pairs drawn anew in each step": (
        "as plainly; steps stay pipelined",
        test_pairs_drawn_anew_each_step_leave_rows_and_traces_as_they_are,
    ),
    "outputs with a row for each edge, or for nodes of a mask": (
        "as plainly",
        test_heads_train_as_plainly,
        *("edges", "edges alone", "selects"),
    ),
    "a readout of the graph behind the last layer": (
        "as plainly; each device reads all rows",
        test_heads_train_as_plainly,
        *("mean", "max", "median", "attention", "Set2Set", "beside each node"),
    ),
    "a readout of each layer": (
        "as plainly",
        test_heads_train_as_plainly,
        "each layer",
    ),
    "`return_attention_weights=True`": (
        "as plainly",
        test_heads_train_as_plainly,
        *("attention weights", "attention weights of GAT", "attention weights with loops"),
    ),
    "a pool between layers": (
        "refused: pool behind the last layer, or `num_chunks=1`",
        test_what_mixes_rows_between_layers_is_refused,
        "a pool between layers",
    ),
    "`TopKPooling` and the like": (
        "refused: train without the strategy",
        test_what_mixes_rows_between_layers_is_refused,
        "top-k pooling",
    ),
}
