"""What cannot be right on chunks, or is no part of a trace, is refused with what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    get_laplacian,
    remove_self_loops,
    scatter,
    to_torch_csr_tensor,
    to_undirected,
)

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers import check_support
from tests.helpers import degrees
from tests.helpers.alike import N, graph
from tests.helpers.engines import one_process_engine

pytestmark = pytest.mark.usefixtures("double")

W = 8  # channels
GRAPH = graph(x=torch.randn(N, W, dtype=torch.float64))
Between = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Runs `between` behind the first of three layers, or before it; it may use `part`."""

    def __init__(
        self, between: Between, part: nn.Module | None = None, *, is_first: bool = False
    ) -> None:
        super().__init__()
        self.is_first = is_first
        self.convs = nn.ModuleList(gnn.GCNConv(W, W) for _ in range(3))
        self.between, self.part, self.norm = [between], part, gcn_norm
        self.emb = nn.Embedding(N, W)
        self.register_buffer("shift", torch.zeros(N, W))
        self.register_buffer("count", torch.zeros(3))
        self.rows, self.adj = torch.rand(N, W), torch.eye(N).to_sparse()
        self.data, self.edges = graph(x=self.rows), GRAPH.edge_index.clone()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x if self.is_first else self.convs[0](x, edge_index).tanh()
        return self.convs[1](self.between[0](self, h, edge_index), edge_index)


def assert_refused(net: nn.Module, words: str, num_chunks: int = 3) -> None:
    with pytest.raises(UnsupportedError, match=words):
        check_support(net, num_chunks=num_chunks)
        engine = one_process_engine(net, partition=torch.arange(N) % num_chunks)
        engine.forward((GRAPH.x, GRAPH.edge_index), {})


class TwoSets(nn.Module):
    """Weights of edges are read with the edges that they belong to, and with the turned ones."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = gnn.GraphConv(W, W), gnn.GraphConv(W, W)

    def forward(
        self, x: Tensor, edge_index: Tensor, rev_edge_index: Tensor, edge_weight: Tensor
    ) -> Tensor:
        x = self.there(x, edge_index, edge_weight).tanh()
        return self.back(x, rev_edge_index, edge_weight)


class OwnWeights(gnn.MessagePassing):
    """A layer with a weight for each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(GRAPH.num_edges))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, scale=self.scale)

    def message(self, x_j: Tensor, scale: Tensor) -> Tensor:
        return x_j * scale.view(-1, 1)


class Weighs(nn.Module):
    """A power iteration on its weight changes buffers, as it may with one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GCNConv(W, W), OwnWeights()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.lin(self.first(x, edge_index).tanh()), edge_index)


@pytest.mark.parametrize("has_own", [False, True])
def test_rows_of_edges_in_another_order_with_one_chunk(has_own: bool) -> None:
    """Layers get edges sorted by target. Only edges in that order may be taken as they are."""
    edges, weight = GRAPH.edge_index, torch.rand(GRAPH.num_edges)
    net, given = (Weighs(), ()) if has_own else (TwoSets(), (edges.flip(0), weight))
    engine = one_process_engine(net, partition=torch.zeros(N, dtype=torch.int64))
    words = r"edges sorted by target(.|\n)*Pass each tensor with a row per edge"
    with pytest.raises(UnsupportedError, match=words):
        engine.forward((GRAPH.x, edges, *given), {})
    if has_own:
        edges = edges[:, edges[1].argsort(stable=True)]
        net.lin.eval()
        engine = one_process_engine(net, partition=torch.zeros(N, dtype=torch.int64))
        found = engine.forward((GRAPH.x, edges), {})
        torch.testing.assert_close(found, net(GRAPH.x, edges), rtol=0, atol=1e-10)


def clamp_as_statement(net: Any, h: Tensor, edges: Tensor) -> Tensor:
    weight = net.count.sum().view(1) - 3
    weight.clamp_(min=0.5)
    return h * weight


def add_in_place_beside(net: Any, h: Tensor, edges: Tensor) -> Tensor:
    kept = h
    h += 1
    return h * kept


def ask_for_a_type(net: Any, h: Tensor, edges: Tensor) -> Tensor:
    return h * 2 if isinstance(h, Tensor) else h


@pytest.mark.parametrize("how", [clamp_as_statement, add_in_place_beside, ask_for_a_type])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_what_a_trace_gets_wrong_is_seen_with_one_chunk_as_well(
    how: Between, num_chunks: int
) -> None:
    words = r"the same as forward (.|\n)*results of operations in place(.|\n)*isinstance"
    assert_refused(Net(how).double(), words, num_chunks)


def test_a_method_of_an_instance() -> None:
    net = Net(lambda net, h, edges: h).double()
    own = net.forward
    vars(net)["forward"] = lambda x, edge_index: own(x, edge_index) * 2
    engine = one_process_engine(net, partition=torch.zeros(N, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match=r"set on an instance of Net(.|\n)*in the class"):
        engine.attach()


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0) + x,
    "sum": lambda x: torch.sum(x, dim=0, keepdim=True) / x.size(0) + x,
    "std": lambda x: (x - 1) / x.std(0),
    "amax": lambda x: x.amax(dim=0) - x,
    "norm": lambda x: x / x.norm(),
    "matmul": lambda x: x @ (x.t() @ x) / 9,
    "einsum": lambda x: x @ torch.einsum("nd,nf->df", x, x) / 9,
    "global_mean_pool": lambda x: x + gnn.global_mean_pool(x, None),
    "matmul, softmax": lambda x: torch.softmax(x @ x.t(), dim=-1) @ x,
    "max": lambda x: x - x.max(0).values,
    "cumsum": lambda x: x.cumsum(0) / N,
    "softmax": lambda x: torch.softmax(x, 0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "argsort": lambda x: x[x.argsort(dim=0)[:, 0]],
    "topk": lambda x: x * x.topk(2, 0)[0].sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_combines_all_nodes_between_layers(name: str) -> None:
    words = rf"all nodes between layers, by '{name.partition(',')[0]}' at test_refused(.|\n)*Pool"
    assert_refused(Net(lambda net, x, e: SUMS[name](x)), words)


def test_the_same_along_features_is_a_function_of_single_rows() -> None:
    def between(net: Any, x: Tensor, _: Tensor) -> Tensor:
        x = F.normalize(x.softmax(-1).cumsum(1).roll(1, 1).flip(1) + x.topk(W)[0].sort()[0])
        return x - x.max(1, keepdim=True).values

    engine = one_process_engine(Net(between), partition=torch.arange(N) % 3)
    engine.forward((GRAPH.x, GRAPH.edge_index), {})


def trains(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    rows, row = torch.zeros((x.size(0), W)), torch.full((x.size(0), 1), 0.5)
    return x + rows + row + torch.ones(x.size(0)).unsqueeze(1) + net.part(x, edge_index)


def test_new_tensors_of_rows_and_medians_train() -> None:
    """PyG's median fails where the first node has no edges: here those of all chunks have none."""
    net = Net(trains, gnn.SAGEConv(W, W, aggr="median"))
    edge_index = GRAPH.edge_index[:, GRAPH.edge_index[1] > 9]
    edge_index = torch.cat([edge_index, edge_index.new_tensor([[1], [0]])], 1)
    engine = one_process_engine(net, partition=torch.arange(N) % 3)
    out = engine.forward((GRAPH.x, edge_index), {})
    torch.testing.assert_close(out, net(GRAPH.x, edge_index))


def test_one_chunk_takes_matrices_made_in_forward_and_weights_set_in_inference_mode() -> None:
    net = Net(makes_a_matrix).eval()
    engine = one_process_engine(net, partition=torch.zeros(N, dtype=torch.long))
    with torch.inference_mode():
        net.convs[0].lin.weight.data = net.convs[0].lin.weight.data / 2
        out = engine.forward((GRAPH.x, GRAPH.edge_index), {})
        torch.testing.assert_close(out, net(GRAPH.x, GRAPH.edge_index))


class Pools(gnn.MessagePassing):
    """Sends to four places of its own, and adds their mean."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = torch.stack([edge_index[0], edge_index[1] % 4])
        return x + self.propagate(edges, x=(x, None), size=(x.size(0), 4)).mean(0)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


@pytest.mark.parametrize("make", [Pools, lambda: gnn.HypergraphConv(W, W)])
def test_one_chunk_takes_messages_to_what_is_no_node(make: Callable[[], nn.Module]) -> None:
    net = Net(lambda net, x, e: net.part(x, e), make())
    engine = one_process_engine(net, partition=torch.zeros(N, dtype=torch.long))
    out = engine.forward((GRAPH.x, GRAPH.edge_index), {})
    torch.testing.assert_close(out, net(GRAPH.x, GRAPH.edge_index))


class SumsByHand(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + scatter(x[edge_index[0]], edge_index[1], 0, dim_size=x.size(0))


def weighted(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    row, col = edge_index
    return net.convs[2](x, edge_index, (x[row] * x[col]).sum(-1).sigmoid())


def gathered(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return torch.gather(x, 0, edge_index.chunk(2)[0].view(-1, 1).expand(-1, x.size(1)))


def normalised(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    edges, weight = get_laplacian(edge_index, None, "sym", x.dtype, x.size(0))
    return net.convs[2](x, edges, weight)


BY_HAND: dict[str, tuple[Between, str]] = {
    "getitem": (weighted, r"test_refused.py:.*`return net.convs\[2\]"),
    "index_select": (lambda net, x, e: x + x.index_select(0, e[0]).sum(0), "test_refused.py"),
    "gather": (gathered, "test_refused.py"),
    "index_add": (lambda net, x, e: x.index_add(0, e[1], x.new_ones(e.size(1), W)), "test_refus"),
    "degree": (lambda net, x, e: degrees.add_degrees(x, e), "degrees.py"),
    "part": (lambda net, x, e: net.part(x, e), "test_refused.py"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_messages_by_hand(name: str) -> None:
    between, place = BY_HAND[name]
    words = rf"Forward passes messages by hand, '{name}' .* at {place}(.|\n)*class Sum"
    assert_refused(Net(between, SumsByHand()), words)


INDICES: dict[str, tuple[Between, str, bool]] = {
    "getitem": (
        lambda net, x, e: net.convs[2](x, e[:, : e.size(1)]) + net.convs[2](x, e[:, :400]),
        "",
        True,
    ),
    "last": (lambda net, x, e: net.convs[2](x, e.t()[..., :400, :].t()), "getitem", True),
    "lt": (lambda net, x, e: net.convs[2](x, e, (torch.arange(e.size(1)) < 400).to(x)), "", True),
    "ge": (lambda net, x, e: net.convs[2](x, e[:, e[0] >= 400]), "", False),
    "clamp": (lambda net, x, e: net.convs[2](x, e.clamp(max=400)), "", False),
    "mod": (lambda net, x, e: net.convs[2](x, e % 400), "", False),
    "gt": (lambda net, x, e: x * (torch.arange(x.size(0)) > 400).to(x).view(-1, 1), "", False),
    "le": (lambda net, x, e: x * (torch.arange(x.size(0))[:, None] <= 400).to(x), "", False),
    "cast": (lambda net, x, e: net.convs[2](x, e, (e[0].double() < 400).double()), "lt", False),
    "sub": (lambda net, x, e: net.convs[2](x, e[:, e[0] - e[1] > -400]), "gt", False),
    "rshift": (lambda net, x, e: net.convs[2](x, e >> 9), "", False),
    "split": (lambda net, x, e: net.convs[2](x, e.split(400, 1)[0]), "", True),
    "narrow": (lambda net, x, e: net.convs[2](x, e.narrow(1, 0, 2)), "", True),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_of_nodes_and_positions_of_edges(name: str) -> None:
    """Of a graph of millions of nodes: the small sample of it has no such numbers."""
    between, word, is_of_edges = INDICES[name]
    words = f"Forward computes '{word or name}' with indices of nodes, or with positions of edges"
    assert_refused(Net(between), words)
    if is_of_edges:  # they are sorted in one chunk too
        assert_refused(Net(between), words, num_chunks=1)


def typed(net: Any, x: Tensor, e: Tensor) -> Tensor:
    edges, kinds = remove_self_loops(e, (e[0] != e[1]).long())
    return net.convs[2](x, edges[:, kinds == 1])


ALLOWED: dict[str, Between] = {
    "ends": lambda net, x, e: net.convs[2](x, e[:, e[0] != e[1]]),
    "padding": lambda net, x, e: net.convs[2](x, e[:, (e[1] != -1) & (e >= 0).all(0)]),
    "types": typed,
    "random": lambda net, x, e: net.convs[2](x, e, (torch.rand(e.size(1)) >= 0).double()),
    "draws": lambda net, x, e: x * (torch.rand(x.size(0)) >= 0).to(x).view(-1, 1),
    "halves": lambda net, x, e: torch.cat([-x[..., W // 2 :], x[..., : W // 2]], -1) + x[..., :1],
    "heads": lambda net, x, e: x.view(-1, 2, W // 2)[..., 0, :].repeat(1, 2),
    "frequencies": lambda net, x, e: x * (torch.arange(W, device=x.device) * 0.1).cos(),
    "constants": lambda net, x, e: torch.tensor([0.5] * 4 + [1.0] * 4, device=x.device) * x,
    **{
        f"{width} channels": lambda net, x, e, width=width: F.pad(x, (0, width - W))[:, :W]
        for width in range(38, 43)  # the sample has 40 edges
    },
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_does_not_depend_on_indices_of_nodes_is_taken(name: str) -> None:
    for num_chunks in (1, 3):
        engine = one_process_engine(Net(ALLOWED[name]), partition=torch.arange(N) % num_chunks)
        engine.forward((GRAPH.x, GRAPH.edge_index), {})


class Counts(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x, edge_index)


def test_a_buffer_that_forward_assigns_is_named_and_restored() -> None:
    net = Counts(lambda net, x, e: x)
    before = net.count
    assert_refused(net, r"values kept on the module: count", num_chunks=1)
    assert net.count is before


def test_a_name_that_python_keeps_for_itself() -> None:
    net = Net(lambda net, x, e: net.part["in"](x), nn.ModuleDict({"in": nn.Linear(W, W)}))
    assert_refused(net, r"names of submodules .* \(got 'part.in', which holds a keyword\)")


class ReadsSources(gnn.MessagePassing):
    """Its forward reads rows of sources before it propagates."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, norm=x[edge_index[0]].sum(-1, keepdim=True).tanh())

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm * x_j


class Runs(nn.Module):
    """A function in a module, which is not traced."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def attends(net: Any, x: Tensor, _: Tensor) -> Tensor:
    return net.part(x.unsqueeze(0)).squeeze(0)


def pools(net: Any, x: Tensor, _: Tensor) -> Tensor:
    return x + net.part(x, torch.zeros_like(x[:, 0], dtype=torch.long))


class BothWays(gnn.MessagePassing):
    """Its forward passes messages in both directions."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.flow = "source_to_target"
        out = self.propagate(edge_index, x=x)
        self.flow = "target_to_source"
        return out + self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()


def weighs(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return net.convs[2](x, *net.norm(edge_index, None, x.size(0)))


def makes_a_matrix(net: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    size = x.size(0), x.size(0)
    return net.convs[2](x, to_torch_csr_tensor(edge_index, size=size))


ATTENTION = "all nodes between layers, by 'part'"
VALUES = "a decision on the values of a tensor"
PARTS: dict[str, tuple[Between, Callable[[], nn.Module | None], str]] = {
    "a mean in a module": (
        lambda net, x, e: net.part(x),
        lambda: Runs(lambda x: x - x.mean(0)),
        "all nodes between layers|same values on chunks",
    ),
    "a softmax in a module": (
        lambda net, x, e: net.part(x),
        lambda: Runs(lambda x: x * torch.softmax(x, dim=0)),
        "all nodes between layers|same values on chunks",
    ),
    "SGFormer": (attends, lambda: gnn.attention.SGFormerAttention(W, head_channels=W), ATTENTION),
    "Performer": (attends, lambda: gnn.attention.PerformerAttention(W, heads=2), ATTENTION),
    "Polynormer": (attends, lambda: gnn.attention.PolynormerAttention(W, 2, 4), ATTENTION),
    "GPSConv": (
        lambda net, x, e: net.part(x, e),
        lambda: gnn.GPSConv(W, gnn.GCNConv(W, W), attn_type="performer"),
        "GPSConv: its attention runs over all nodes",
    ),
    "a pool": (
        pools,
        gnn.aggr.MeanAggregation,
        r"combines all nodes between layers, by 'part' at test_refused.*\n.*\nPool behind the last",
    ),
    "top-k pooling": (
        lambda net, x, e: net.part(x, e)[0],
        lambda: gnn.TopKPooling(W, ratio=0.5),
        "TopKPooling: it chooses the nodes of later layers among all",
    ),
    "rows of sources": (
        lambda net, x, e: net.part(x, e),
        ReadsSources,
        r"index.*`return self.*message\(self, x_j",
    ),
    "values": (lambda net, x, e: x if x.mean() > 0 else -x, lambda: None, VALUES),
    "a number": (lambda net, x, e: F.pad(x, (0, int(x.max()))), lambda: None, VALUES),
    "edges turned both ways": (
        lambda net, x, e: net.convs[2](x, to_undirected(e, num_nodes=x.size(0))),
        lambda: None,
        "Forward computes 'to_undirected' of the edges at test_refused(.|\n)*training_step",
    ),
    "a Laplacian": (normalised, lambda: None, "computes 'get_laplacian' of the edges at test_ref"),
    "a norm of edges on self": (
        weighs,
        lambda: None,
        r"values of a tensor .*in gcn_norm\(\) at test_ref.*Call gcn_norm\(\) in training_step",
    ),
    "a matrix made of edges": (makes_a_matrix, lambda: None, "computes 'to_torch_csr_tensor'"),
    "a layer in both directions": (
        lambda net, x, e: net.part(x, e),
        BothWays,
        r"Layer 'part' sets self.flow in its forward(.|\n)*Build two layers",
    ),
    "shuffled rows": (
        lambda net, x, e: x + x[torch.randperm(x.size(0))],
        lambda: None,
        "rows of nodes, or shuffles them, between(.|\n)*shuffle them in training_step",
    ),
    "several layers of one kind": (
        lambda net, x, e: net.part[1](net.part[0](x, e), e),
        lambda: nn.ModuleList(gnn.SAGEConv(W, W, aggr="lstm") for _ in range(2)),
        r"'part.0.aggr_module', 'part.1.aggr_module', a LSTMAggregation: .*use aggr=\"mean\"",
    ),
    "the size of the graph": (
        lambda net, x, e: x.view(N, 2, W // 2).flatten(1),
        lambda: None,
        r"small part of the graph .*at test_refused.py:\d+, `lambda net, x, e: x.view\(N",
    ),
    "edges turned by an index": (
        lambda net, x, e: net.convs[2](x, e[[1, 0]]),
        lambda: None,
        r"reads edges that 'getitem' has turned.*(.|\n)*Write edge_index.flip\(0\)",
    ),
    "edges turned by a stack": (
        lambda net, x, e: net.convs[2](x, torch.stack([e[1], e[0]])),
        lambda: None,
        "edges that 'stack' has turned",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_no_function_of_single_rows(name: str) -> None:
    between, make, words = PARTS[name]
    assert_refused(Net(between, make()), words)


NOT_HELD: dict[str, tuple[Between, str]] = {
    "an attribute": (lambda net, x, e: x + net.rows, "'self.rows'"),
    "edges": (lambda net, x, e: net.convs[2](x, net.edges), "'self.edges'"),
    "a graph": (lambda net, x, e: x + net.data.x, "'self.data.x'"),
    "a matrix": (lambda net, x, e: net.adj @ x, "'self.adj'"),
    "a global": (lambda net, x, e: x + GRAPH.x, "GRAPH.x"),
    "ones": (lambda net, x, e: x + torch.ones(N, 1), "torch.ones"),
    "constants": (lambda net, x, e: x * torch.tensor([1.0, 2.0] * (W // 2)), ""),
    "random numbers": (lambda net, x, e: x + torch.rand(N, 1), "torch.rand"),
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_tensors_that_are_no_arguments_parameters_or_buffers(name: str) -> None:
    between, found = NOT_HELD[name]
    assert_refused(Net(between), f"Forward reads .*{found}.*\nPass it as an arg", num_chunks=1)


def remembers(net: Any, x: Tensor, _: Tensor) -> Tensor:
    h = x + net.shift
    net.shift.copy_(h.detach())
    return h


def clamps(net: Any, x: Tensor, _: Tensor) -> Tensor:
    net.emb.weight.data.clamp_(-0.1, 0.1)
    return x + net.emb.weight


def assigns(net: Any, x: Tensor, _: Tensor) -> Tensor:
    net.emb.weight.data = F.normalize(net.emb.weight.data)
    return x + net.emb.weight


def writes_rows(net: Any, x: Tensor, _: Tensor) -> Tensor:
    h = x.clone()
    h[x > 0] = 0.0
    return h


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (remembers, "'module.shift', which is no argument"),
        (clamps, "'module.emb.weight', which is no argument"),
        (assigns, "does not support assignment of data"),
        (writes_rows, r"an assignment to a part of a tensor.*torch\.where.*torch\.cat"),
    ],
)
def test_writes_that_others_would_see(write: Between, found: str) -> None:
    """In one chunk too, where no values are compared."""
    assert_refused(Net(write, is_first=True), found, num_chunks=1)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, adj: adj @ x,
    "mm": lambda x, adj: torch.mm(adj, x),
    "to_dense": lambda x, adj: x + adj.to_dense().sum(1, keepdim=True),
    "t": lambda x, adj: adj.t() @ x,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_matrix_between_layers(name: str) -> None:
    net = Net(lambda net, x, adj: PRODUCTS[name](x, adj))
    engine = one_process_engine(net, partition=torch.arange(N) % 3)
    adj = torch.sparse_coo_tensor(GRAPH.edge_index, torch.rand(GRAPH.num_edges), (N, N))
    with pytest.raises(UnsupportedError, match=rf"'{name}' to a sparse(.|\n)*SimpleConv"):
        engine.forward((GRAPH.x, adj.coalesce().to_sparse_csr()), {})
