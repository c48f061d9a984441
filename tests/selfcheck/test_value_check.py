"""The self-check: what no table lists is tried on a small graph and refused if it differs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, softmax

from lightning_gnnpipe.calls import Inputs, Kind, classify, flatten_call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.selfcheck import check_layers
from lightning_gnnpipe.stages import SampleRun, cut_layers, draw_sample, draw_samples, trace
from lightning_gnnpipe.stages.mixing import turn_leaves
from tests.helpers.cases import slow
from tests.helpers.engines import one_process_engine

N, D = 30, 4


class Base(nn.Module):
    def __init__(self, make: Callable[..., nn.Module] = gnn.GCNConv) -> None:
        super().__init__()
        self.convs = nn.ModuleList(make(D, D) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.part: nn.Module = nn.Identity()

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.dropout(x).relu()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.between(self.convs[0](x, edge_index), edge_index)
        return self.convs[1](x, edge_index)


def base(between: Callable[[Any, Tensor, Tensor], Tensor]) -> type[Base]:
    """Return the network that has this between its layers."""
    return type("Net", (Base,), {"between": between})


def with_part(make: Callable[[], nn.Module]) -> Callable[[], Base]:
    """Return what builds a network with a module between its layers."""

    def build() -> Base:
        net = base(lambda self, x, edge_index: self.part(x))()
        net.part = make()
        return net

    return build


def attend(self: Base, x: Tensor, edge_index: Tensor) -> Tensor:
    weight = softmax(x[edge_index[1]], edge_index[1], num_nodes=x.size(0))
    return torch.zeros_like(x).index_add(0, edge_index[1], weight * x[edge_index[1]])


def stop_gradients(self: Base, x: Tensor, edge_index: Tensor) -> Tensor:
    """A trace does not take the `no_grad` down: it would train what the module does not."""
    with torch.no_grad():
        return Base.between(self, x, edge_index)


class Noisy(nn.Module):
    """Random numbers a row; hidden values as wide as a sample may be long."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(D, 29), nn.Linear(29, 48), nn.Linear(48, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x + torch.randn_like(x)) * torch.rand(x.size(0), 1)


class ChangesEdges(Base):
    """Normalisation must follow the edges that the model has left."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = remove_self_loops(edge_index)
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


class Counter(nn.Module):
    """Counts its calls in a buffer, as running statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class CenteredGrad(torch.autograd.Function):
    """The identity, whose gradient is centered over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(dim=0, keepdim=True)


class CentersGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return CenteredGrad.apply(x)


class Scale(nn.Module):
    """Makes gradients of earlier layers small beside those of later ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-2


class Gated(nn.Module):
    """A buffer that is 0 hides a mean over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(dim=0, keepdim=True)


class Picky(gnn.SAGEConv):
    """Passes messages once more on few nodes."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        return super().forward(out, edge_index) if x.size(0) < N // 2 else out


class BothWays(Base):
    """Edges in both directions, and a norm over all nodes: gradients of chunks are not plain's."""

    def __init__(self) -> None:
        super().__init__()
        self.convs[0] = gnn.DirGNNConv(gnn.SAGEConv(D, D))
        self.norm = nn.BatchNorm1d(D)

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(x).relu()


class ReentrantConv(gnn.GATConv):
    """An activation checkpoint in the layer, where no trace sees that it refuses autograd.grad."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(checkpoint(torch.tanh, x, use_reentrant=True), edge_index)


class InputBeside(Base):
    """Its input comes from a trained encoder, and skips the layers."""

    def __init__(self) -> None:
        super().__init__(ReentrantConv)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.dropout(x)
        return self.convs[1](self.convs[0](x, edge_index), edge_index) + x


class OverwritesInput(gnn.SAGEConv):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x.relu_(), edge_index)


class Overwrites(Base):
    def __init__(self) -> None:
        super().__init__()
        self.convs[1] = OverwritesInput(D, D)

    def between(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.dropout(x)


class MeanByHand(MessagePassing):
    """0 / 0 for a node without neighbours, of which the user's graph may have none."""

    def __init__(self, *_: int) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        ones = torch.ones(edge_index.size(1), 1)
        count = torch.zeros(x.size(0), 1).index_add(0, edge_index[1], ones)
        return self.propagate(edge_index, x=self.lin(x)) / count


class Distances(MeanByHand):
    """Its gradient is NaN at a self-loop."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i - x_j).square().sum(-1, keepdim=True).sqrt() * x_j


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(56))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(x.relu(), edge_index)
        return x


class ReturnsTwice(Base):
    """The same tensor under two names, and an input."""

    def forward(self, x: Tensor, edge_index: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, edge_index)
        return {"out": out, "dropped": self.dropout(out), "x": x}


def check(
    module: nn.Module, dtype: torch.dtype = torch.float32, edges: Tensor | None = None
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_nodes = N if edges is None else 2 * edges.size(1)
    if edges is None:
        edges = torch.randint(0, N, (2, 80), generator=generator)
    x = torch.randn(num_nodes, D, generator=generator).to(dtype)
    call = flatten_call(module, (x.requires_grad_(isinstance(module, InputBeside)), edges), {})
    inputs = classify(call)
    run = SampleRun(draw_samples(module, call, inputs), call)
    graph = trace(module, call, run)
    turn_leaves(graph, ["leaf_1"])
    check_layers(module, cut_layers(graph, module, run.values), call, inputs, on_chunks=True)


@pytest.mark.parametrize(
    "kind",
    [
        Base,
        base(lambda self, x, e: x * degree(e[1], x.size(0)).unsqueeze(-1)),
        base(attend),
        ReturnsTwice,
        with_part(Noisy),
        ChangesEdges,
        BothWays,
        base(lambda self, x, e: checkpoint(self.convs[1], x, e, use_reentrant=True)),
        lambda: Base(ReentrantConv),
        InputBeside,
        Overwrites,
        lambda: Base(MeanByHand),
        lambda: Base(Distances),
        Deep,
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_p4_what_is_right_on_chunks_passes(kind: Callable[[], nn.Module], training: bool) -> None:
    module = kind().train(training)
    weights = [p.clone() for p in module.parameters()]
    check(module)
    assert all(torch.equal(p, w) for p, w in zip(module.parameters(), weights, strict=True))
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            base(lambda self, x, e: x - x.mean(dim=0, keepdim=True)),
            "same values .* a difference of .* begins in or next to layer 'convs.0'",
        ),
        (
            base(lambda self, x, e: torch.zeros_like(x).index_add(0, e[0], x[e[1]])),
            "run on a chunk .*out of bounds.*sees other nodes only in messages",
        ),
        (with_part(Counter), "changes no buffer .* a change of"),
        (base(stop_gradients), "one mode of autograd .* torch.no_grad"),
        (with_part(CentersGradients), "same gradients .* begins in or next to layer 'convs.0'"),
        (with_part(Gated), "same values .* begins in or next to layer 'convs.0'"),
        (
            with_part(lambda: nn.Sequential(CentersGradients(), Scale())),
            "same gradients .* begins in or next to layer 'convs.0'",
        ),
        (lambda: Base(Picky), "pass messages equally often on each chunk .*passes more"),
    ],
)
def test_p4_what_is_wrong_on_chunks_is_refused(kind: Callable[[], Base], text: str) -> None:
    """And disturbs nothing."""
    module, state = kind(), torch.get_rng_state()
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    with pytest.raises(UnsupportedError, match=text):
        check(module)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(b, buffers[name]) for name, b in module.named_buffers())


class Centers(MessagePassing):
    """Takes the mean of all rows that it sees, before it passes them on."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x - x.mean(0)))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def test_p4_rows_of_the_chunk_itself_are_passed_on() -> None:
    """Also if each edge joins a node and the next one, so that chunks in turn have none inside."""
    pairs = torch.arange(100).view(-1, 2).t()
    check(Base(MeanByHand), edges=pairs)
    with pytest.raises(UnsupportedError, match="begins in or next to layer"):
        check(Base(Centers), edges=pairs)


class ByOutDegree(MessagePassing):
    """Divides by the number of edges that begin in the source: a chunk has only some of them."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor, edge_index_j: Tensor, size_j: int) -> Tensor:
        return x_j / degree(edge_index_j, size_j, x_j.dtype)[edge_index_j].view(-1, 1)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_p4_neighbours_of_sources_are_counted_on_large_graphs(is_sorted: bool) -> None:
    """Of 4,000 edges 48 that are evenly spaced have as many sources."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(400, (2, 4000), generator=generator)
    edges = edges[:, edges[0].argsort()] if is_sorted else edges
    check(Base(), edges=edges)
    with pytest.raises(UnsupportedError, match="begins in or next to layer"):
        check(Base(ByOutDegree), edges=edges)


@pytest.mark.parametrize("self_check", [True, False])
def test_the_check_can_be_switched_off(self_check: bool) -> None:
    """Then a module that differs is the user's own responsibility."""
    edges = torch.randint(0, N, (2, 80), generator=torch.Generator().manual_seed(0))
    engine = one_process_engine(
        with_part(CentersGradients)(), partition=torch.arange(N) // 8, self_check=self_check
    )
    refused = pytest.raises(UnsupportedError, match="the same gradients")
    with refused if self_check else nullcontext():
        engine.forward((torch.randn(N, D), edges), {})


@pytest.mark.parametrize("seed", [0, slow(1)])
def test_half_precision_of_many_layers_is_no_difference(seed: int) -> None:
    torch.manual_seed(seed)
    module = Deep()
    with torch.autocast("cpu", torch.bfloat16):
        check(module)
    check(module.bfloat16(), torch.bfloat16)


def test_half_precision_hides_no_difference() -> None:
    torch.manual_seed(1)  # of one in ten the difference is within the tolerance
    module = with_part(CentersGradients)().bfloat16()
    with pytest.raises(UnsupportedError, match="same gradients"):
        check(module, torch.bfloat16)


def test_a_sample_of_a_graph_with_more_edges_than_float_can_count() -> None:
    module, num_edges = Base(), 61_859_140
    edges = torch.zeros(2, 1, dtype=torch.int64).expand(2, num_edges)
    call = flatten_call(module, (torch.randn(2, D), edges), {})
    inputs = Inputs((Kind.NODE, Kind.EDGE_INDEX), 2, edges, (num_edges,), (0, 0))
    assert draw_sample(module, call, inputs).edge_index.size(0) == 2
