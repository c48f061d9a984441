"""Depth in odd shapes: what people write between two message-passing layers trains unmodified."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn.models.rev_gnn import GroupAddRev
from torch_geometric.utils import (
    add_self_loops,
    dropout_edge,
    get_laplacian,
    scatter,
)

from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages import cut_module
from tests.helpers import degrees
from tests.helpers.alike import D, assert_alike, fit, graph, net_of

W = 8  # channels


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


class SkipsWhereWidthsFit(Convs):
    """The first layer widens, so that its input cannot be added."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.SAGEConv(D, W)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in (self.first, *self.convs):
            h = conv(x, edge_index).relu()
            if h.size(-1) == x.size(-1):
                h = h + x
            x = h
        return self.decode(x)


class SkipsWhereShapesFit(SkipsWhereWidthsFit):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in (self.first, *self.convs):
            h = conv(x, edge_index).relu()
            x = h + x if h.shape == x.shape else h
        return self.decode(x)


class AsksForShapes(Convs):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == D, f"width {x.shape[1]}"
        if edge_index.size(0) != 2 or x.dtype != self.encode.weight.dtype:
            raise ValueError(f"shapes {x.shape} and {edge_index.shape}")
        num_nodes, _ = x.shape
        h = self.encode(x)
        for conv in self.convs:
            h = conv(h, edge_index).view(num_nodes, -1).tanh() / math.sqrt(h.size(-1))
        for _ in range(h.size(1) // 4):
            h = h * 1.5
        return self.decode(h.reshape(*h.shape[:-1], W))


class PrintsAndFormats(Convs):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"conv{i}": gnn.GCNConv(W, W) for i in range(4)})
        self.norms = nn.ModuleDict({f"width{W}": nn.LayerNorm(W)})

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        print(f"input of {x.size(1):>4} columns", x.shape, x.device)
        for i in range(4):
            x = x + self.layers[f"conv{i}"](x, edge_index)
            x = self.norms[f"width{x.size(-1)}"](x)
        return x


class Nested(nn.Module):
    """Blocks in nn.Sequential and torch_geometric.nn.Sequential, one in the other."""

    def __init__(self) -> None:
        super().__init__()

        def block() -> nn.Module:
            layers = [(gnn.GCNConv(W, W), "x, edge_index -> x"), nn.LayerNorm(W), nn.ReLU()]
            return gnn.Sequential("x, edge_index", layers)

        self.encode = nn.Sequential(nn.Linear(D, W), nn.ReLU())
        self.blocks = gnn.Sequential("x, edge_index", [(block(), "x, edge_index -> x")] * 2)
        self.last = nn.ModuleDict({"a": block(), "b": block()})

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.blocks(self.encode(x), edge_index)
        for block in self.last.values():
            x = x + block(x, edge_index)
        return x


class Checkpoints(Convs):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def block(self, conv: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + conv(x, edge_index).relu()

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            if self.training:
                x = checkpoint(self.block, conv, x, edge_index, use_reentrant=self.use_reentrant)
            else:
                x = self.block(conv, x, edge_index)
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


class UShaped(Convs):
    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        skips = []
        for conv in self.convs[:2]:
            x = conv(x, edge_index).relu()
            skips.append(x)
        for conv in self.convs[2:]:
            x = conv(x + skips.pop(), edge_index).relu()
        return x


class Repeats(Convs):
    """One layer five times, towards a fixed point."""

    def __init__(self) -> None:
        super().__init__(1)

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(5):
            z = torch.tanh(0.5 * self.convs[0](z, edge_index) + x)
        return z


class Reversible(Convs):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            GroupAddRev(gnn.SAGEConv(W // 2, W // 2), num_groups=2) for _ in range(4)
        )

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, edge_index)
        return x


class GatesOverDepth(Convs):
    """An LSTM whose time is depth; its state goes through all layers beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTM(W, W, bias=False) for _ in range(4))

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = c = torch.zeros(1, x.shape[0], W, dtype=x.dtype, device=x.device)
        for conv, cell in zip(self.convs, self.cells, strict=True):
            x, (h, c) = cell(conv(x, edge_index).tanh()[None], (h, c))
            x = x[0]
        return x


class KeepsState(GatesOverDepth):
    """The state stays a tuple, and begins with None."""

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        state = None
        for conv, cell in zip(self.convs, self.cells, strict=True):
            x, state = cell(conv(x, edge_index).unsqueeze(0), state)
            x = x.squeeze(0)
        return x


class KeepsCell(Convs):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(W, W)

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x.new_zeros(x.size(0), W)
        for conv in self.convs:
            h = self.cell(conv(x, edge_index), h)
            x = x + h
        return h


class ReadsAll(Convs):
    """JumpingKnowledge over all layers, by an LSTM; heads first in a stack."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.jump = gnn.JumpingKnowledge(mode, W, 4) if mode == "lstm" else None

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            found.append(x)
        return torch.stack(found).mean(0) if self.jump is None else self.jump(found)


class Stacks(Convs):
    """A stack of all earlier layers, the nodes in its second dimension, grows beside x."""

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        stack = x[None]
        for conv in self.convs:
            x = conv(stack.mean(0), edge_index).relu()
            stack = torch.cat([stack, x[None]])
        return stack[-1]


class TakesSizesOfRows(Convs):
    """The number of rows is asked for in the first layer, and used in all others."""

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        n = x.size(0)
        for conv in self.convs:
            x = conv(x, edge_index).view(n, 2, W // 2).transpose(1, 2).reshape(n, W)
        return x


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


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Laplacian": (lambda: Owns(Laplacian), 4),
    "skips by width": (SkipsWhereWidthsFit, 5),
    "skips by shape": (SkipsWhereShapesFit, 5),
    "shapes": (AsksForShapes, 4),
    "prints": (PrintsAndFormats, 4),
    "nested": (Nested, 4),
    "checkpoints": (lambda: Checkpoints(use_reentrant=False), 4),
    "reentrant checkpoints": (lambda: Checkpoints(use_reentrant=True), 4),
    "dense": (Dense, 4),
    "U-shaped": (UShaped, 4),
    "repeats": (Repeats, 5),
    "reversible": (Reversible, 4),
    "LSTM over depth": (GatesOverDepth, 4),
    "LSTM with a tuple": (KeepsState, 4),
    "GRU over depth": (KeepsCell, 4),
    "jumping LSTM": (lambda: ReadsAll("lstm"), 4),
    "mean over depth": (lambda: ReadsAll("mean"), 4),
    "stacks": (Stacks, 4),
    "sizes": (TakesSizesOfRows, 4),
}


def num_layers(net: nn.Module) -> int:
    data = graph()
    call = flatten_call(net, (data.x, data.edge_index), {})
    return len(cut_module(net.double(), call, classify(call)).segments)


@pytest.mark.some_cases(9)
@pytest.mark.parametrize("name", NETS)
def test_depth_is_cut_at_each_call(name: str) -> None:
    make, number = NETS[name]
    assert num_layers(make()) == number


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", NETS)
def test_depth_trains_as_plainly(name: str) -> None:
    assert_alike(NETS[name][0])


def test_a_state_beside_the_rows_crosses_stages() -> None:
    assert_alike(GatesOverDepth, num_stages=2)


class SumsByHand(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + scatter(x[edge_index[0]], edge_index[1], 0, dim_size=x.size(0))


def beside(by_hand: Callable[[Any, Tensor, Tensor], Tensor]) -> type[nn.Module]:
    """Return a net with messages by hand before its last layer."""

    def forward(net: Any, x: Tensor, e: Tensor) -> Tensor:
        x = net.convs[0](net.encode(x), e)
        return net.convs[1](by_hand(net, x, e), e)

    return net_of(Convs, forward, part=SumsByHand)


def weighted(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    row, col = edge_index
    return net.convs[2](x, edge_index, (x[row] * x[col]).sum(-1).sigmoid())


def gathered(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return torch.gather(x, 0, edge_index.chunk(2)[0].view(-1, 1).expand(-1, x.size(1)))


def normalised(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    edges, weight = get_laplacian(edge_index, None, "sym", x.dtype, x.size(0))
    return net.convs[2](x, edges, weight)


BY_HAND: dict[str, tuple[Callable[..., Tensor], str]] = {
    "getitem": (weighted, r"test_depth.py:.*`return net.convs\[2\]"),
    "index_select": (lambda net, x, e: x + x.index_select(0, e[0]).sum(0), "test_depth.py"),
    "gather": (gathered, "test_depth.py"),
    "index_add": (lambda net, x, e: x.index_add(0, e[1], x.new_ones(e.size(1), W)), "test_depth"),
    "degree": (lambda net, x, e: degrees.add_degrees(x, e), "degrees.py"),
    "part": (lambda net, x, e: net.part(x, e), "test_depth.py"),
    "get_laplacian": (normalised, "test_depth.py"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_messages_by_hand_are_refused_in_words(name: str) -> None:
    by_hand, place = BY_HAND[name]
    net = beside(by_hand)().double()
    call = flatten_call(net, (graph().x, graph().edge_index), {})
    words = rf"Forward passes messages by hand, '{name}' .* at {place}(.|\n)*class Mean"
    with pytest.raises(UnsupportedError, match=words):
        cut_module(net, call, classify(call))


class ReadsSources(Laplacian):
    """A layer whose forward reads rows of sources before it propagates."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, norm=x[edge_index[0]].sum(-1, keepdim=True).tanh())


def test_rows_of_sources_in_the_forward_of_a_layer_are_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match=r"index.*`return self.*message\(self, x_j"):
        fit(lambda: Owns(ReadsSources), num_chunks=3)


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
        for part in (self.encode, self.convs, self.decode):
            x = data.x
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
    assert not [one for one in caplog.messages if "exact" in one]


class Asks(Convs):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.between(self.encode(x), edge_index)
        if self.what == "values":
            return self.decode(x) if x.mean() > 0 else x
        width = int(x.max()) if self.what == "number" else 3
        return F.pad(x, (0, width))


@pytest.mark.parametrize("what", ["values", "number"])
def test_questions_about_values_are_refused(what: str) -> None:
    with pytest.raises(UnsupportedError, match="a decision on the values of a tensor"):
        fit(lambda: Asks(what), num_chunks=3)


def drops_edges(net: Any, data: Data) -> Any:
    edges, _ = dropout_edge(data.edge_index, p=0.3, training=net.training)
    return net(data.x, edges)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_edges_dropped_in_a_step_train_as_plainly(num_stages: int) -> None:
    assert_alike(SkipsWhereWidthsFit, drops_edges, num_stages=num_stages)


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


@pytest.mark.parametrize("kind", [SelectsEdges, DropsHardlyAny])
@pytest.mark.parametrize("conv", [gnn.GCNConv, gnn.SAGEConv, gnn.GATConv])
def test_edges_that_forward_selects_train_as_plainly(
    conv: Callable[[int, int], nn.Module], kind: type[SelectsEdges]
) -> None:
    assert_alike(lambda: kind(conv), with_features_of_edges)


class DropsEdges(SkipsWhereWidthsFit):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            edge_index = edge_index[:, torch.rand_like(edge_index[0], dtype=x.dtype) > 0.3]
        return super().forward(x, edge_index)


def test_edges_dropped_in_one_mode_alone_are_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match="drop edges in training_step, not in forward"):
        fit(DropsEdges, num_chunks=3)


def with_features_of_edges(net: Any, data: Data) -> Any:
    return net(data.x, data.edge_index, data.edge_attr)


trained = test_depth_trains_as_plainly
