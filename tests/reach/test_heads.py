"""What follows the last message-passing layer and mixes rows: decoders, readouts, attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch_geometric.data import Data

from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages import cut, cut_module, trace
from tests.helpers.alike import D, N, assert_alike, by_name, fit, graph, net_of
from tests.helpers.trainers import weights

W = 8


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.SAGEConv(D, W), gnn.SAGEConv(W, W), gnn.SAGEConv(W, W)])

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


encodes = partial(net_of, Encodes)


def decode_pairs(net: Any, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:
    z = net.encode(x, edge_index)
    source, target = edge_label_index
    return net.score(torch.cat([z[source], z[target]], dim=-1)).squeeze(-1)


DecodesPairs = encodes(
    decode_pairs,
    score=lambda: nn.Sequential(
        nn.Linear(2 * W, W, bias=False), nn.BatchNorm1d(W), nn.Linear(W, 1)
    ),
)


def decode_edges(net: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Tensor]:
    """Return rows of edges, of nodes and of pairs of edge features, in a dict."""
    z = net.encode(x, edge_index)
    src, dst = edge_index
    return {"edges": z[src] * z[dst] + net.of_edges(edge_attr), "nodes": z}


def transform_edges(
    net: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor
) -> tuple[Tensor, Tensor]:
    """Return features of edges, changed by themselves, as an output with rows of edges."""
    edges = net.of_edges(edge_attr).tanh()
    z = net.last(net.encode(x, edge_index), edge_index, edges)
    return z, edges.square()


def reconstruct(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    z = net.encode(x, edge_index)
    return torch.sigmoid(z @ z.t())


def read_each_layer(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """Return a readout of each layer, in the order of the layers."""
    found = []
    for conv in net.convs:
        x = conv(x, edge_index).relu()
        found.append(gnn.global_add_pool(x, None))
    return torch.cat(found, dim=-1)


def reads(read: Callable[[Any, Tensor], Any], width: int = W, **parts: Any) -> type[nn.Module]:
    """Return a net with a readout over the graph, and a layer behind it."""

    def forward(net: Any, x: Tensor, edge_index: Tensor) -> Any:
        return read(net, net.encode(x, edge_index))

    return encodes(forward, out=lambda: nn.Linear(width, 2), **parts)


def pool(net: Any, z: Tensor) -> Tensor:
    return net.out(net.pool(z, torch.zeros_like(z[:, 0], dtype=torch.long)))


def attend(net: Any, z: Tensor) -> Tensor:
    """Attend over all nodes by a module of torch, as one sequence."""
    z = z[None]
    return net.out(net.part(z, z, z, need_weights=False)[0][0])


def attend_over_depth(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """Attend over the layers of each node by itself, between layers."""
    depth = [x := conv(x, edge_index).tanh() for conv in net.convs]
    rows = net.part(torch.stack(depth, 1))[:, -1]
    return net.last(rows, edge_index)


class Attends(nn.Module):
    def __init__(self, kind: str = "Transformer") -> None:
        super().__init__()
        make: Any = {
            "GAT": partial(gnn.GATConv, add_self_loops=False),
            "Transformer": gnn.TransformerConv,
            "loops": gnn.GATConv,
        }
        self.first, self.last = make[kind](D, 4, heads=2), make[kind](W, W)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x, (edges, first) = self.first(x, edge_index, return_attention_weights=True)
        out, last = self.last(x.tanh(), edge_index, return_attention_weights=True)
        return out, edges, first, last


call = by_name(
    edge_label_index=lambda data: data.pairs,
    mask=lambda data: data.x[:, 0] > 0,
)
NETS: dict[str, Callable[[], nn.Module]] = {
    "pairs": DecodesPairs,
    "edges": encodes(decode_edges, of_edges=lambda: nn.Linear(3, W)),
    "edges alone": encodes(
        transform_edges,
        of_edges=lambda: nn.Linear(3, W),
        last=lambda: gnn.GINEConv(nn.Linear(W, W), edge_dim=W),
    ),
    "reconstructs": encodes(reconstruct),
    "selects": encodes(lambda net, x, edge_index, mask: net.encode(x, edge_index)[mask]),
    "max": reads(lambda net, z: net.out(z.max(dim=0).values[None])),
    "the first rows": reads(lambda net, z: net.out(z[:20])),
    "with nodes": reads(lambda net, z: (net.out(z), net.out(z.mean(0) + z))),
    "norm by hand": reads(lambda net, z: net.out((z - z.mean(0)) / (z.std(0) + 1e-2))),
    "Set2Set": reads(pool, 2 * W, pool=lambda: gnn.aggr.Set2Set(W, processing_steps=2)),
    "each layer": encodes(read_each_layer),
    "attention": reads(attend, part=lambda: nn.MultiheadAttention(W, 2, batch_first=True)),
    "attention over depth": encodes(
        attend_over_depth,
        part=lambda: nn.TransformerEncoderLayer(W, 2, W, dropout=0.0, batch_first=True),
        last=lambda: gnn.SAGEConv(W, W),
    ),
    "median": reads(pool, pool=gnn.aggr.MedianAggregation),
    "attention weights of GAT": partial(Attends, "GAT"),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", NETS)
def test_heads_train_as_plainly(name: str) -> None:
    assert_alike(NETS[name], call)


def test_attention_weights_of_added_loops_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="add_self_loops=False"):
        assert_alike(partial(Attends, "loops"), call)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["pairs", "Set2Set", "attention weights of GAT"])
def test_heads_train_in_two_stages(name: str) -> None:
    assert_alike(NETS[name], call, num_stages=2)


def test_shards_return_rows_of_edges() -> None:
    assert_alike(NETS["edges alone"], call, num_stages=2, graph_parallel=2)


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
    told = [one.message for one in caplog.records if "Pipeline" not in one.message]
    assert not [one for one in told if "exact" in one]


def test_the_head_draws_alike_on_all_ranks() -> None:
    """Dropout behind the readout: one loss on all ranks, and the same with one stage."""
    drops = encodes(
        lambda net, x, edge_index: net.drop(
            net.out(net.encode(x, edge_index).mean(0, keepdim=True))
        ),
        drop=lambda: nn.Dropout(0.5),
        out=lambda: nn.Linear(W, 64),
    )
    one, two = (fit(drops, num_chunks=3, num_stages=stages) for stages in (1, 2))
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_one_chunk_may_combine_all_nodes_between_layers() -> None:
    def between(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        x = net.convs[0](x, edge_index)
        return net.convs[1](torch.softmax(x @ x.t(), dim=-1) @ x, edge_index)

    plain, exact = (fit(encodes(between), num_chunks=n) for n in (0, 1))
    torch.testing.assert_close(weights(exact), weights(plain), rtol=0, atol=1e-9)


@pytest.mark.usefixtures("double")
def test_attention_beside_the_layers_runs_on_all_rows() -> None:
    def of_one_graph(net: Any, data: Data) -> Any:
        return net(data.x, data.edge_index, torch.zeros(N, dtype=torch.int64))

    options = {"trans_dropout": 0.0, "gnn_dropout": 0.0}
    assert_alike(lambda: gnn.SGFormer(D, 8, 3, **options), of_one_graph)


def test_a_graph_u_net_is_refused_on_two_devices() -> None:
    words = "TopKPooling: it chooses the nodes of later layers among all"
    with pytest.raises(ProcessRaisedException, match=words):
        fit(lambda: gnn.GraphUNet(D, W, 3, depth=2), num_chunks=4, num_stages=2)


def test_the_head_is_as_late_and_as_small_as_it_can_be() -> None:
    """The linear layer runs in the last stage; what all ranks get is its few columns."""
    out = {"out": lambda: nn.Linear(W, 2)}
    narrows = encodes(lambda net, x, edge_index: net.out(net.encode(x, edge_index)).mean(0), **out)
    data, net = graph(), narrows().double()
    call = flatten_call(net, (data.x, data.edge_index), {})
    layers = cut_module(net, call, classify(call))
    assert [layers.values[name].row_shape for name in layers.outputs] == [(2,)]
    assert layers.head is not None and not list(layers.head.module.parameters())
