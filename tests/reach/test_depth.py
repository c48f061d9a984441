"""Depth in odd shapes: what people write between message-passing layers trains unmodified.

Most networks run without Lightning: an exact step equals plain PyG, and so do the outputs of a step
in chunks behind it, with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import add_self_loops, dropout_edge, get_laplacian

from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import tensors_in
from lightning_gnnpipe.layers import check_support
from tests.helpers.alike import D, N, assert_alike, by_name, fit, graph, net_of
from tests.helpers.engines import one_process_engine

W = 8  # channels
PARTITION = torch.arange(N) * 7 % N // 15
ON_FEATURES, ON_EDGES = ("x", "edge_index"), ("x", "edge_index", "edge_attr")


def wave(like: Tensor) -> Tensor:
    return torch.sin(torch.arange(like.numel())).view_as(like)


def loss_of(output: Any) -> Tensor:
    return sum((t * wave(t)).sum() for t in tensors_in(output))


def assert_trains_as_plain(net: nn.Module, names: tuple[str, ...] = ON_FEATURES) -> PipelineEngine:
    """Run an exact step and one in chunks beside plain PyG; return the engine."""
    net = net.double()
    for parameter in net.parameters():
        parameter.data += 0.05 * wave(parameter)
    kwargs = {name: graph()[name] for name in names}
    check_support(net, num_chunks=3)
    engine = one_process_engine(net, partition=PARTITION)
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    expected = net(**kwargs)
    loss_of(expected).backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    for name, buffer in net.named_buffers():
        buffer.data = buffers[name]
    for step in range(2):
        net.zero_grad(set_to_none=True)
        engine.set_step(step_index=step)
        found = engine.forward((), kwargs)
        ours, theirs = list(tensors_in(found)), list(tensors_in(expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        loss_of(found).backward()
        ours = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        assert ours.keys() == grads.keys()
        if step == 0:
            torch.testing.assert_close(ours, grads, rtol=1e-9, atol=1e-9)
    return engine


def num_layers(engine: PipelineEngine) -> int:
    [number] = {len(mode.layers.segments) for mode in engine.model._modes.values()}
    return number


class Convs(nn.Module):
    """Four layers between an encoder and a decoder."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(D, W), nn.Linear(W, 3)
        self.convs = nn.ModuleList(gnn.GCNConv(W, W) for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.decode(self.between(self.encode(x), edge_index))

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class SkipsWhereShapesFit(Convs):
    """The first layer widens, so that its input cannot be added."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.SAGEConv(D, W)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in (self.first, *self.convs):
            h = conv(x, edge_index).relu()
            if h.size(-1) == x.size(-1):
                h = h + x
            x = h / 2 if h.shape == x.shape else h
        return self.decode(x)


class AsksForShapes(Convs):
    """In assertions, branches, loops, f-strings and prints."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({f"width{W}": nn.LayerNorm(W)})

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == D, f"width {x.shape[1]}"
        if edge_index.size(0) != 2 or x.dtype != self.encode.weight.dtype:
            raise ValueError(f"shapes {x.shape} and {edge_index.shape}")
        print(f"input of {x.size(1):>4} columns", x.shape, x.device)
        num_nodes, _ = x.shape
        h = self.norms[f"width{W}"](self.encode(x))
        for conv in self.convs:
            h = conv(h, edge_index).view(num_nodes, -1).tanh() / math.sqrt(h.size(-1))
            h = h.view(num_nodes, 2, W // 2).transpose(1, 2).reshape(num_nodes, W)
        for _ in range(h.size(1) // 4):
            h = h * 1.5
        return self.decode(h.reshape(*h.shape[:-1], W))


class Nested(nn.Module):
    """Blocks in nn.Sequential and torch_geometric.nn.Sequential, one in the other."""

    def __init__(self) -> None:
        super().__init__()

        def block() -> nn.Module:
            layers = [(gnn.GCNConv(W, W), "x, edge_index -> h"), nn.LayerNorm(W), nn.ReLU()]
            layers += [(lambda x, h: [x, h], "x, h -> both"), (sum, "both -> x")]
            return gnn.Sequential("x, edge_index", layers)

        self.encode = nn.Sequential(nn.Linear(D, W), nn.ReLU())
        self.blocks = gnn.Sequential("x, edge_index", [(block(), "x, edge_index -> x")] * 2)
        self.last = nn.ModuleDict({"a": block(), "b": block()})

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.blocks(self.encode(x), edge_index)
        for block in self.last.values():
            x = x + block(x, edge_index)
        return x


def between(how: Any, **parts: Callable[[], Any]) -> type[nn.Module]:
    """Return a net that runs `how` between encoder and decoder."""

    def forward(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        return net.decode(how(net, net.encode(x), edge_index))

    return net_of(Convs, forward, **parts)


def checkpoints(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    def block(conv: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + conv(x, edge_index).relu()

    for conv in net.convs:
        if net.training:
            x = checkpoint(block, conv, x, edge_index, use_reentrant=net.use_reentrant)
        else:
            x = block(conv, x, edge_index)
    return x


class Dense(nn.Module):
    """Each layer reads all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(D + i * 4, 4) for i in range(4))
        self.decode = nn.Linear(D + 16, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = [x]
        for conv in self.convs:
            found.append(conv(torch.cat(found, dim=-1), edge_index).relu())
        return self.decode(torch.cat(found, dim=-1))


def repeats(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """One layer five times, towards a fixed point."""
    z = torch.zeros_like(x)
    for _ in range(5):
        z = torch.tanh(0.5 * net.convs[0](z, edge_index) + x)
    return z


class RevBlock(nn.Module):
    """As in PyG's RevGNN example."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(channels), gnn.SAGEConv(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, dropout_mask: Tensor | None = None) -> Tensor:
        x = self.norm(x).relu()
        if self.training and dropout_mask is not None:
            x = x * dropout_mask
        return self.conv(x, edge_index)


def reversible(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    mask = torch.zeros_like(x).bernoulli_(1 - 0.0)
    mask = mask.requires_grad_(False) / (1 - 0.0)
    for block in net.blocks:
        x = block(x, edge_index, mask)
    return x


def gates_over_depth(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """An LSTM whose time is depth: its state begins with None and travels beside the rows."""
    state = None
    for conv, cell in zip(net.convs, net.cells, strict=True):
        x, state = cell(conv(x, edge_index).tanh().unsqueeze(0), state)
        x = x.squeeze(0)
    return x


def keeps_cell(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    h = x.new_zeros(x.size(0), W)
    for conv in net.convs:
        h = net.cell(conv(x, edge_index), h)
        x = x + h
    return h


def stacks(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """A stack of all earlier layers, the nodes in its second dimension, grows beside x."""
    stack = x[None]
    for conv in net.convs:
        x = conv(stack.mean(0), edge_index).relu()
        stack = torch.cat([stack, x[None]])
    return stack[-1]


def in_place(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    scales = net.scales.softmax(0)
    for i, conv in enumerate(net.convs):
        x = net.act(conv(x, edge_index)) * scales[i]
        x += 1.0
    return x


def lists(make: Callable[[], nn.Module], number: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(make() for _ in range(number))


class Owns(Convs):
    """Layers by the user."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(kind() for _ in range(4))

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = 0.3 * x + conv(x, edge_index).relu()
        return x


class Laplacian(gnn.MessagePassing):
    """A polynomial of the Laplacian."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm * x_j

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        n = x.size(0)
        edges, norm = get_laplacian(edge_index, None, "sym", x.dtype, n)
        both, shifted = add_self_loops(edges, -norm, fill_value=2.0, num_nodes=n)
        h = self.propagate(edges, x=x, norm=norm.unsqueeze(-1))
        return x - h / 2 + self.propagate(both, x=h, norm=shifted.unsqueeze(-1)) / 8


GatesOverDepth = between(gates_over_depth, cells=lists(lambda: nn.LSTM(W, W, bias=False)))
NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Laplacian": (lambda: Owns(Laplacian), 4),
    "skips by shape": (SkipsWhereShapesFit, 5),
    "shapes and prints": (AsksForShapes, 4),
    "nested": (Nested, 4),
    "checkpoints": (between(checkpoints, use_reentrant=lambda: False), 4),
    "reentrant checkpoints": (between(checkpoints, use_reentrant=lambda: True), 4),
    "dense": (Dense, 4),
    "repeats": (between(repeats, convs=lists(lambda: gnn.GCNConv(W, W), 1)), 5),
    "reversible": (
        between(reversible, blocks=lists(lambda: gnn.GroupAddRev(RevBlock(W // 2), num_groups=2))),
        4,
    ),
    "LSTM over depth": (GatesOverDepth, 4),
    "GRU over depth": (between(keeps_cell, cell=lambda: nn.GRUCell(W, W)), 4),
    "stacks": (between(stacks), 4),
    "in place": (
        between(
            in_place,
            act=lambda: nn.ReLU(inplace=True),
            scales=lambda: nn.Parameter(torch.ones(4)),
        ),
        4,
    ),
}


@pytest.mark.some_cases(6)
@pytest.mark.parametrize("name", NETS)
def test_depth_is_cut_at_each_call_and_trains_as_plainly(name: str) -> None:
    make, number = NETS[name]
    assert num_layers(assert_trains_as_plain(make())) == number


def test_a_state_beside_the_rows_crosses_stages() -> None:
    assert_alike(GatesOverDepth, num_stages=2)


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


@pytest.mark.some_cases(6)
@pytest.mark.parametrize("jk", [None, "cat", "max", "lstm"])
@pytest.mark.parametrize("norm", [None, "BatchNorm", "LayerNorm", "GraphNorm"])
@pytest.mark.parametrize("act_first", [False, True])
def test_models_of_pyg_train_as_plainly(jk: str | None, norm: str | None, act_first: bool) -> None:
    make = FAMILY[(bool(jk) * 3 + len(norm or "") + act_first) % len(FAMILY)]
    assert_trains_as_plain(make(D, W, 3, 3, norm=norm, jk=jk, act_first=act_first))


class DeeperGCN(nn.Module):
    """As in PyG's example for ogbn-proteins: the norm of the first block is the last norm."""

    def __init__(self, block: str = "res+", norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.node_encoder, self.edge_encoder = nn.Linear(D, W), nn.Linear(3, W)
        self.layers = nn.ModuleList()
        for i in range(3):
            conv = gnn.GENConv(W, W, aggr="softmax", learn_t=True, num_layers=2, norm="layer")
            options = {"dropout": 0.0, "ckpt_grad": i % 3}
            self.layers.append(gnn.DeepGCNLayer(conv, norm(W), nn.ReLU(), block, **options))
        self.lin = nn.Linear(W, 3)

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
        self.lin, self.conv = nn.Linear(D, 3), gnn.SAGEConv(D, 3)

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
        h, edge_attr = self.node_encoder(x), self.edge_encoder(edge_attr)
        for layer in self.layers:
            h = layer(h, edge_index, edge_attr)
        return self.lin(h)

    def pipeline_layers(self) -> list[tuple[nn.Module, str]]:
        blocks = [(layer, "h, edge_index, edge -> h") for layer in self.layers]
        ends = (self.node_encoder, "x -> h"), (self.edge_encoder, "edge_attr -> edge")
        return [*ends, *blocks, (self.lin, "h -> out")]


def test_models_that_say_their_own_cut_have_these_layers() -> None:
    assert num_layers(assert_trains_as_plain(Listed())) == 4
    assert num_layers(assert_trains_as_plain(ListedBlocks(), ON_EDGES)) == 3


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
    engine = one_process_engine(Listed(*listed).double(), partition=partition)
    with pytest.raises(UnsupportedError, match=text):
        engine.forward((graph().x, graph().edge_index), {})


class OnGraph(nn.Module):
    """Takes a graph, changes its rows and returns it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, data: Data) -> Data:
        is_conv = isinstance(self.layer, gnn.MessagePassing)
        data.x = self.layer(data.x, data.edge_index) if is_conv else self.layer(data.x).relu()
        return data


class PassesGraphOn(Convs):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(layer for conv in self.convs for layer in (OnGraph(conv), OnGraph(nn.Linear(W, W))))
        )
        self.encode, self.decode = OnGraph(self.encode), OnGraph(self.decode)

    def forward(self, data: Data) -> Data:
        assert data.edge_weight is None and "x" in data
        for part in (self.encode, self.convs, self.decode):
            x = data.x + data.x.new_ones(data.num_nodes, 1)
            data = part(data)
            data.x = data.x + x.mean(-1, keepdim=True)
        return data


def on_graph(net: Any, data: Data) -> Tensor:
    given = data.clone()
    found = net(given)
    assert found is given
    return found.x


def test_a_graph_that_forward_changes_is_returned() -> None:
    assert_alike(PassesGraphOn, on_graph)
    assert_alike(PassesGraphOn, on_graph, num_stages=2)


class KeepsResults(Laplacian):
    """A layer that leaves tensors on itself, which it reads in no other call."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.mean = nn.Parameter(torch.zeros(())), None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        self.share = self.power.sigmoid()
        self.mean = out.detach().mean()
        return self.share * out


def test_what_layers_leave_on_themselves_is_no_input(caplog: pytest.LogCaptureFixture) -> None:
    assert_alike(lambda: Owns(KeepsResults))
    assert not [one for one in caplog.messages if "exact" in one and "Pipeline" not in one]


def drops_edges(net: Any, data: Data) -> Any:
    edges, _ = dropout_edge(data.edge_index, p=0.3, training=net.training)
    return net(data.x, edges)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_edges_dropped_in_a_step_train_as_plainly(num_stages: int) -> None:
    assert_alike(SkipsWhereShapesFit, drops_edges, num_stages=num_stages)


class SelectsEdges(Convs):
    """Like `dropout_edge`, which is known when it runs; but each run selects the same."""

    def __init__(self, conv: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(W, W) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        is_kept = torch.bernoulli((edge_attr[:, 0] > 0.3).to(x.dtype)).bool()
        return super().forward(x, edge_index[:, is_kept])


class DropsHardlyAny(SelectsEdges):
    """Drops no edge, so that chunks, which draw other numbers, can be compared."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        edge_index, _ = dropout_edge(edge_index, p=1e-300, training=self.training)
        return super().forward(x, edge_index, edge_attr)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", [SelectsEdges, DropsHardlyAny])
@pytest.mark.parametrize("conv", [gnn.GCNConv, gnn.SAGEConv, gnn.GATConv])
def test_edges_that_forward_selects_train_as_plainly(
    conv: Callable[[int, int], nn.Module], kind: type[SelectsEdges]
) -> None:
    assert_alike(lambda: kind(conv), by_name())


class DropsEdges(SkipsWhereShapesFit):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            edge_index = edge_index[:, torch.rand_like(edge_index[0], dtype=x.dtype) > 0.3]
        return super().forward(x, edge_index)


def test_edges_dropped_in_one_mode_alone_are_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match="drop edges in training_step, not in forward"):
        fit(DropsEdges, num_chunks=3)
