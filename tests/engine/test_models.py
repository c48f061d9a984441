"""Whole models as users write them: trained in chunks, they equal plain PyG at the fixed point."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import tensors_in
from lightning_gnnpipe.layers import check_support
from tests.helpers.engines import one_process_engine

N, D, C = 26, 8, 3
PARTITION = torch.arange(N) * 7 % N // 9
HISTOGRAM = torch.tensor([1, 3, 4, 3])
FAMILY: list[Callable[..., BasicGNN]] = [
    gnn.models.GCN,
    gnn.models.GraphSAGE,
    gnn.models.GIN,
    gnn.models.GAT,
    partial(gnn.models.GAT, v2=True, heads=2),
    partial(gnn.models.PNA, aggregators=["mean", "max"], scalers=["identity"], deg=HISTOGRAM),
    gnn.models.EdgeCNN,
]


def make_batch() -> dict[str, Any]:
    torch.manual_seed(3)
    number = torch.arange(61)
    edge_index = torch.stack([(number * 11 + number // 7) % (N - 1), (number * 5 + 2) % (N - 1)])
    x = torch.randn(N, D, dtype=torch.float64)
    edge_attr = torch.randn(61, D, dtype=torch.float64)
    data = Data(x=x, edge_index=edge_index)
    return {"x": x, "edge_index": edge_index, "edge_attr": edge_attr, "data": data}


def wave(like: Tensor) -> Tensor:
    return torch.sin(torch.arange(like.numel())).view_as(like)


def loss_of(output: Any) -> Tensor:
    return sum((t * wave(t)).sum() for t in tensors_in(output))


ON_FEATURES, ON_EDGES = ("x", "edge_index"), ("x", "edge_index", "edge_attr")


def assert_trains_as_plain(net: nn.Module, names: tuple[str, ...] = ON_FEATURES) -> None:
    """An exact step equals plain PyG; a step in chunks after it has the same outputs."""
    net = net.double()
    for parameter in net.parameters():
        parameter.data += 0.05 * wave(parameter)
    batch = make_batch()
    kwargs = {name: batch[name] for name in names}
    check_support(net, num_chunks=3)
    engine = one_process_engine(net, partition=PARTITION)
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    expected = net(**kwargs)
    loss_of(expected).backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    for name, buffer in net.named_buffers():
        buffer.data = buffers[name]
    for step in range(2):
        engine.set_step(step_index=step)
        found = engine.forward((), kwargs)
        ours, theirs = list(tensors_in(found)), list(tensors_in(expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        loss_of(found).backward()
        ours = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        assert ours.keys() == grads.keys()
        if step == 0:
            torch.testing.assert_close(ours, grads, rtol=1e-9, atol=1e-9)
        net.zero_grad(set_to_none=True)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("jk", [None, "cat", "max", "lstm"])
@pytest.mark.parametrize("norm", [None, "BatchNorm", "LayerNorm", "GraphNorm"])
@pytest.mark.parametrize("act_first", [False, True])
def test_basic_gnns(jk: str | None, norm: str | None, act_first: bool) -> None:
    make = FAMILY[(bool(jk) * 3 + len(norm or "") + act_first) % len(FAMILY)]
    assert_trains_as_plain(make(D, 8, 3, C, norm=norm, jk=jk, act_first=act_first))


class DeeperGCN(nn.Module):
    """As in PyG's example for ogbn-proteins: the norm of the first block is the last norm."""

    def __init__(self, block: str = "res+", norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.node_encoder, self.edge_encoder = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList()
        for i in range(3):
            conv = gnn.GENConv(D, D, aggr="softmax", learn_t=True, num_layers=2, norm="layer")
            options = {"dropout": 0.0, "ckpt_grad": i % 3}
            self.layers.append(gnn.DeepGCNLayer(conv, norm(D), nn.ReLU(), block, **options))
        self.lin = nn.Linear(D, C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.node_encoder(x)
        edge_attr = self.edge_encoder(edge_attr)
        x = self.layers[0].conv(x, edge_index, edge_attr)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, edge_attr)
        return self.lin(self.layers[0].act(self.layers[0].norm(x)))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("block", ["res+", "res", "plain"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_deeper_gcn(block: str, norm: type[nn.Module]) -> None:
    assert_trains_as_plain(DeeperGCN(block, norm), ON_EDGES)


class GNNBlock(nn.Module):
    """As in PyG's RevGNN example."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(channels), gnn.SAGEConv(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, dropout_mask: Tensor | None = None) -> Tensor:
        x = self.norm(x).relu()
        if self.training and dropout_mask is not None:
            x = x * dropout_mask
        return self.conv(x, edge_index)


class RevGNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.norm = nn.Linear(D, D), nn.Linear(D, C), nn.LayerNorm(D)
        blocks = (gnn.GroupAddRev(GNNBlock(D // 2), num_groups=2) for _ in range(3))
        self.convs = nn.ModuleList(blocks)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        mask = torch.zeros_like(x).bernoulli_(1 - 0.0)
        mask = mask.requires_grad_(False) / (1 - 0.0)
        for conv in self.convs:
            x = conv(x, edge_index, mask)
        return self.lin2(self.norm(x).relu())


class Checkpointed(nn.Module):
    """As GCNII in PyG's example, with activation checkpoints by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, C)])
        self.convs = nn.ModuleList(
            gnn.GCN2Conv(D, 0.1, 0.5, layer + 1, shared_weights=False, normalize=True)
            for layer in range(4)
        )
        self.dropout = 0.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, training=self.training)
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = F.dropout(x, self.dropout, training=self.training)
            x = checkpoint(conv, x, x_0, edge_index, use_reentrant=False).relu()
        return self.lins[1](x).log_softmax(dim=-1)


def sequential() -> nn.Module:
    layers = [
        (nn.Dropout(p=0.0), "x -> x"),
        (gnn.GCNConv(D, 16), "x, edge_index -> x1"),
        nn.ReLU(inplace=True),
        (gnn.GCNConv(16, 16), "x1, edge_index -> x2"),
        nn.ReLU(inplace=True),
        (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
        (gnn.JumpingKnowledge("cat", 16, num_layers=2), "xs -> x"),
        nn.Linear(2 * 16, C),
    ]
    return gnn.Sequential("x, edge_index", layers)


class Block(nn.Module):
    """Its forward depends on values, so it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = gnn.GCNConv(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        h = self.conv(x, edge_index)
        if float(self.lin.weight.sum()) > -1e9:
            h += self.lin(x)
        return h.relu_(), x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(D, C), gnn.SAGEConv(D, C)

    def forward(self, h: Tensor, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.lin(h) + self.conv(x, edge_index)


class Listed(nn.Module):
    """Says itself how it is cut."""

    def __init__(self, last: str = "h, x, edge_index -> h, out", *more: Any) -> None:
        super().__init__()
        self.encoder = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.last, self.more = Head(), last, more

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        for block in self.blocks:
            h, _ = block(h, edge_index) if len(h) else (h, h)
        return self.head(h, x, edge_index)

    def pipeline_layers(self) -> list[Any]:
        blocks = [(block, "h, edge_index -> h, before") for block in self.blocks]
        return [(self.encoder, "x -> h"), *blocks, (self.head, self.last), *self.more]


class ListedBlocks(DeeperGCN):
    """Blocks with activation checkpoints, called as they are."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.ckpt_grad = 1

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h = self.node_encoder(x)
        for layer in self.layers:
            h = layer(h, edge_index, edge_attr)
        return self.lin(h)

    def pipeline_layers(self) -> list[tuple[nn.Module, str]]:
        blocks = [(layer, "h, edge_index, edge_attr -> h") for layer in self.layers]
        return [(self.node_encoder, "x -> h"), *blocks, (self.lin, "h -> out")]


class EdgeUpdates(nn.Module):
    """Edge features are updated between layers; two inputs, a dict with a tuple inside out."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GINEConv(nn.Linear(D, D)) for _ in range(3))
        self.edges = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(D, C) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Any]:
        for conv, edge in zip(self.convs, self.edges, strict=True):
            edge_attr = torch.tanh(edge(edge_attr)) + edge_attr
            x = conv(x, edge_index, edge_attr).relu()
        return {"logits": self.heads[0](x), "both": (self.heads[1](x), x)}


class TakesData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(2))

    def forward(self, data: Data) -> tuple[Tensor, Tensor]:
        x, edge_index = data.x, data.edge_index
        assert data.edge_weight is None and "x" in data
        first = self.convs[0](x, edge_index)
        ones = x.new_ones(data.num_nodes, 1)
        return first, self.convs[1](first + ones, edge_index)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GraphConv(D, D) for _ in range(3))
        self.act, self.scales = nn.ReLU(inplace=True), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scales = self.scales.softmax(0)
        for i, conv in enumerate(self.convs):
            x = self.act(conv(x, edge_index)) * scales[i]
            x += 1.0
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "reversible blocks": (RevGNN, ON_FEATURES),
    "checkpoints": (Checkpointed, ON_FEATURES),
    "edge updates": (EdgeUpdates, ON_EDGES),
    "sequential": (sequential, ON_FEATURES),
    "in place": (InPlace, ON_FEATURES),
    "data": (TakesData, ("data",)),
    "says its own cut": (Listed, ON_FEATURES),
    "listed blocks": (ListedBlocks, ON_EDGES),
}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_plainly(name: str) -> None:
    make, arguments = MODELS[name]
    assert_trains_as_plain(make(), arguments)


def run_listed(*listed: Any, partition: Tensor = PARTITION) -> Any:
    engine, batch = one_process_engine(Listed(*listed), partition=partition), make_batch()
    engine.forward((batch["x"].float(), batch["edge_index"]), {})
    return engine


def test_a_model_that_says_its_own_cut_has_these_layers() -> None:
    assert {len(mode.layers.segments) for mode in run_listed().model._modes.values()} == {4}


RIGHT, ONE_CHUNK = "h, x, edge_index -> h, out", torch.zeros(N, dtype=torch.int64)
NO_PAIR = "return pairs of a submodule"


@pytest.mark.parametrize(
    ("listed", "partition", "text"),
    [
        (["h, y, edge_index -> h, out"], PARTITION, "earlier outputs.*got y"),
        (["h, h, edge_index -> h, out"], PARTITION, "difference"),
        (["h, h, edge_index -> h, out"], ONE_CHUNK, "difference"),
        ([RIGHT, (torch.relu, "h -> h")], PARTITION, NO_PAIR),
        ([RIGHT, (nn.Linear(D, D), "h -> h")], PARTITION, NO_PAIR),
        ([RIGHT, "h"], PARTITION, NO_PAIR),
    ],
)
def test_a_wrong_cut_is_refused(listed: list[Any], partition: Tensor, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        run_listed(*listed, partition=partition)
