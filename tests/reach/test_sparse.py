"""Sparse adjacency matrices: the numbers of plain PyG, in one chunk and in several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
import torch_geometric.transforms as T
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_edge_index

from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import Matrices, matrix
from tests.helpers.alike import Fits, Forward, assert_alike, fit
from tests.helpers.trainers import weights

N, D, C = 13, 6, 3
LAYOUTS = {"csr": torch.sparse_csr, "coo": torch.sparse_coo, "csc": torch.sparse_csc}


@pytest.fixture(autouse=True)
def by_sgd(double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam would hide a factor on gradients."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    monkeypatch.setattr(Fits, "configure_optimizers", lambda self: sgd(self.parameters()))


def graph(*, weighted: bool = True, has_loop: bool = True) -> Data:
    """A directed graph, maybe with a self-loop; `adj_csr` and so on hold edges and weights."""
    torch.manual_seed(3)
    dense = (torch.rand(N, N) < 0.25).double().fill_diagonal_(0.0)
    dense[4, 4] = float(has_loop)
    if weighted:
        dense = dense * (0.2 + torch.rand(N, N))
    data = Data(x=torch.randn(N, D))
    for name, layout in LAYOUTS.items():
        data[f"adj_{name}"] = dense.to_sparse(layout=layout)
    row, column = dense.nonzero().t()  # row-major, as CSR
    data.edge_index, data.edge_weight = torch.stack([column, row]), dense[row, column]
    return data


def normalised(data: Data) -> Data:
    """Replace the matrices by GCN's normalised ones."""
    [matrix, _] = gcn_norm(data.adj_csr, None, N)
    index, weight = to_edge_index(matrix)
    dense = matrix.to_dense()
    for name, layout in LAYOUTS.items():
        data[f"adj_{name}"] = dense.to_sparse(layout=layout)
    data.edge_index, data.edge_weight = index.flip(0), weight
    return data


class Stack(nn.Module):
    """Layers `conv(x, *edges)`, with a residual."""

    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(D, 8), nn.Linear(8, C)
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, *edges: Any) -> Tensor:
        x = self.lin(x).relu()
        for conv in self.convs:
            x = x + conv(x, *edges).tanh()
        return self.head(x)


class Initial(Stack):
    """GCNII: layers also read the first rows."""

    def forward(self, x: Tensor, *edges: Any) -> Tensor:
        x = first = self.lin(x).relu()
        for conv in self.convs:
            x = conv(x, first, *edges).relu()
        return self.head(x)


class Kipf(nn.Module):
    """Kipf's GCN, whose products with a normalised matrix are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.mid, self.head = nn.Linear(D, 8), nn.Linear(8, 8), nn.Linear(8, C)
        self.sum = gnn.SimpleConv(aggr="sum")

    def forward(self, x: Tensor, *edges: Any) -> Tensor:
        x = self.sum(self.lin(x), *edges).relu()
        x = self.sum(self.mid(x), *edges).relu()
        return self.sum(self.head(x), *edges)


def stack(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Stack(*(kind(8, 8, **options) for _ in range(3)))


def gcn2() -> nn.Module:
    convs = (gnn.GCN2Conv(8, 0.1, 0.5, i + 1, cached=True, normalize=False) for i in range(3))
    return Initial(*convs)


# name: (network, values of the matrix)
NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gcn": (stack(gnn.GCNConv), "ones"),
    "gcn weighted": (stack(gnn.GCNConv, cached=True), "weights"),
    "graph": (stack(gnn.GraphConv), "weights"),
    "sage": (stack(gnn.SAGEConv), "ones"),
    "sage weighted": (stack(gnn.SAGEConv), "weights"),
    "gin max": (
        lambda: Stack(*(gnn.GINConv(nn.Linear(8, 8), aggr="max") for _ in range(3))),
        "ones",
    ),
    "gat": (stack(gnn.GATConv, heads=2, concat=False), "ones"),
    "transformer": (stack(gnn.TransformerConv), "ones"),
    "gcn2": (gcn2, "normalised"),
    "appnp": (lambda: Stack(gnn.APPNP(3, 0.1), gnn.APPNP(2, 0.2)), "weights"),
    "basic": (lambda: gnn.GCN(D, 8, 3, C), "weights"),
    "cluster": (stack(gnn.ClusterGCNConv), "weights"),
    "kipf": (Kipf, "normalised"),
}
WITHOUT_CSC = ("gcn", "gcn weighted", "gat", "transformer", "appnp", "basic", "cluster")  # in PyG
WITHOUT_WEIGHT = ("sage", "gin max", "gat", "transformer", "cluster")
CASES = [(name, layout) for name in NETS for layout in LAYOUTS]
CASES = [one for one in CASES if one[1] != "csc" or one[0] not in WITHOUT_CSC]


def data_of(values: str, *, has_loop: bool = True) -> Data:
    data = graph(weighted=values != "ones", has_loop=has_loop)
    return normalised(data) if values == "normalised" else data


def assert_same(found: Fits, expected: Fits, tolerance: float) -> None:
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=tolerance)
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=0, atol=tolerance)


def on_matrix(layout: str) -> Forward:
    return lambda net, data: net(data.x, data[f"adj_{layout}"])


def on_edges(name: str) -> Forward:
    if name in WITHOUT_WEIGHT:
        return lambda net, data: net(data.x, data.edge_index)
    return lambda net, data: net(data.x, data.edge_index, data.edge_weight)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_one_chunk_equals_plain_pyg(name: str, layout: str) -> None:
    make, values = NETS[name]
    assert_alike(make, on_matrix(layout), data_of(values))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", NETS)
def test_chunks_equal_the_same_network_on_edges(name: str) -> None:
    """PyG normalises a matrix otherwise than edges where there is a self-loop: here is none."""
    make, values = NETS[name]
    data, call = data_of(values, has_loop=False), on_matrix("csr")
    chunks: dict[str, Any] = {"num_chunks": 3, "partition": torch.arange(N) % 3, "epochs": 5}
    found = fit(make, call, data, **chunks)
    exact = fit(make, call, data, num_chunks=1, epochs=5)
    assert not torch.equal(weights(found), weights(exact))
    with torch.no_grad():
        torch.testing.assert_close(found.outputs, [call(found.net, data)], rtol=0, atol=1e-10)
    if name != "sage weighted":  # only matrices weigh the messages of SAGE
        assert_same(found, fit(make, on_edges(name), data, **chunks), 1e-10)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["gat", "kipf"])
def test_two_stages_equal_one(name: str) -> None:
    make, values = NETS[name]
    data, call = data_of(values), on_matrix("coo")
    one, two = (weights(fit(make, call, data, 3, stages)) for stages in (1, 2))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-10)


def test_a_graph_after_transforms_is_passed_whole() -> None:
    class Net(Stack):
        def forward(self, data: Data) -> Tensor:
            return super().forward(data.x, data.adj_t)

    given = graph()
    transform = T.Compose([T.ToUndirected(), T.ToSparseTensor(layout=torch.sparse_csr)])
    data = transform(Data(x=given.x, edge_index=given.edge_index))
    assert "edge_index" not in data
    assert_alike(lambda: Net(gnn.GCNConv(8, 8), gnn.SAGEConv(8, 8)), Net.__call__, data)


def test_an_edge_index_of_pyg_is_a_tensor_of_edges() -> None:
    data = graph(weighted=False, has_loop=False)
    made = EdgeIndex(data.edge_index, sparse_size=(N, N))
    data.sorted_edges = made.sort_by("col").values
    make, call = stack(gnn.SAGEConv), lambda net, data: net(data.x, data.sorted_edges)
    assert_alike(make, call, data)
    found, expected = (fit(make, one, data, num_chunks=3) for one in (call, on_matrix("csr")))
    assert_same(found, expected, 1e-10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.adj_csr.to_dense()[:, :9].to_sparse_csr(), "13 rows and 9 columns"),
        (lambda data: torch.eye(9).to_sparse_csr(), "9 rows for 13 nodes"),
    ],
)
def test_matrices_that_are_not_over_the_nodes_are_refused(change: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"one row and one column for each node.*{words}"):
        fit(Kipf, lambda net, data: net(data.x, change(data)), graph(), 3)


class Multiplies(Kipf):
    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return adj @ super().forward(x, adj)


def test_products_behind_the_last_layer_train_as_plainly() -> None:
    assert_alike(Multiplies, on_matrix("csr"), graph())


def test_the_parts_of_a_matrix_stay_the_same_tensors() -> None:
    """Each step asks for them; the same tensors have known fingerprints."""
    known, net = Matrices(), Kipf()
    adj = graph(weighted=False).adj_csr
    x = torch.randn(N, D)
    first, second = (flatten_call(net, (x, adj), {}, matrices=known) for _ in range(2))
    assert [a is b for a, b in zip(first.leaves, second.leaves, strict=True)] == [True] * 3
    assert first.names == ("x", "args.1.edge_index", "args.1.nodes")
    assert classify(first).num_nodes == N
    adj.values().mul_(2.0)  # ones no more
    assert len(flatten_call(net, (x, adj), {}, matrices=known).leaves) == 4


class StandIn(matrix.SparseTensor):  # type: ignore[misc]
    """What PyG calls of torch-sparse's `SparseTensor`, which is not installed here."""

    def __init__(
        self, row: Tensor, col: Tensor, value: Tensor | None, sparse_sizes: tuple[int, int]
    ) -> None:
        self.parts, self.shape = (row, col, value), sparse_sizes

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.parts

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        counts = torch.bincount(self.parts[0], minlength=self.shape[0])
        return F.pad(counts.cumsum(0), (1, 0)), *self.parts[1:]

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def nnz(self) -> int:
        return self.parts[0].numel()

    def has_value(self) -> bool:
        return self.parts[2] is not None

    def set_value(self, value: Tensor | None, layout: str | None = None) -> StandIn:
        return StandIn(*self.parts[:2], value, self.shape)

    def is_cuda(self) -> bool:
        return False

    def requires_grad(self) -> bool:
        return False

    def to_torch_sparse_csr_tensor(self) -> Tensor:
        row, col, value = self.parts
        value = torch.ones(len(row)) if value is None else value
        return torch.sparse_coo_tensor(torch.stack([row, col]), value, self.shape).to_sparse_csr()

    def matmul(self, other: Tensor, reduce: str = "sum") -> Tensor:
        return torch.sparse.mm(self.to_torch_sparse_csr_tensor(), other, reduce)

    __matmul__ = matmul

    def to(self, *args: Any, **kwargs: Any) -> StandIn:
        return self


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["graph", "sage weighted", "kipf", "transformer"])
def test_matrices_of_torch_sparse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "SparseTensor", StandIn)
    monkeypatch.setattr(matrix, "WITH_TORCH_SPARSE", True)
    make, _ = NETS[name]
    data, call = graph(), on_matrix("t")
    column, row = data.edge_index
    data.adj_t = StandIn(row, column, data.edge_weight, (N, N))
    if name != "transformer":  # reads values as features of edges
        edges = on_edges("sage" if name == "sage weighted" else name)
        assert_same(fit(make, call, data, 3), fit(make, edges, data, 3), 1e-10)
    assert_alike(make, call, data)
