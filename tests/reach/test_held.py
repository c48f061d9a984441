"""Tensors that a module reads beside its arguments: tables of weights, data that it holds.

The oracle calls an inner module with the same tensors as arguments, which other tests compare with
oracles of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, scatter, to_torch_csr_tensor, to_undirected

from lightning_gnnpipe.errors import UnsupportedError
from tests.helpers.alike import (
    D,
    Fits,
    Forward,
    N,
    assert_alike,
    fit,
    graph,
    on_features,
)
from tests.helpers.cases import slow
from tests.helpers.record import as_held
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


class Table(Holds):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(N, D, **options)

    def forward(self, edge_index: Tensor) -> Tensor:
        return self.inner(self.emb.weight, edge_index)


class Rows(Holds):
    """A parameter beside features; the layer before changes all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(N, D))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(x + self.rows, edge_index)


class LooksUp(Table):
    def forward(self, edge_index: Tensor) -> Tensor:
        return self.inner(self.emb(torch.arange(N, device=edge_index.device)), edge_index)


class Ones(Holds):
    def forward(self, edge_index: Tensor) -> Tensor:
        return self.inner(torch.ones(N, D), edge_index)


class OwnBuffers(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", GRAPH.x)
        self.register_buffer("edge_index", GRAPH.edge_index)

    def forward(self) -> Tensor:
        return self.inner(self.x, self.edge_index)


class OwnGraph(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.data = graph()

    def forward(self) -> Tensor:
        return self.inner(self.data.x, self.data.edge_index)


class OwnEdges(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.edges = GRAPH.edge_index

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.edges)


class OfTheScript(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, GRAPH.edge_index)


class EdgeWeights(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(NUM_EDGES))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(x, edge_index, self.weight.sigmoid())


class OwnMatrix(nn.Module):
    """As the authors of LightGCN and NGCF write it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(N, D)
        self.lins = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        values = torch.rand(NUM_EDGES, dtype=torch.float64)
        self.adj = to_torch_csr_tensor(GRAPH.edge_index, values, size=(N, N))

    def forward(self) -> Tensor:
        x = total = self.emb.weight
        for lin in self.lins:
            x = torch.sparse.mm(self.adj, lin(x)).tanh()
            total = total + x
        return total / 4


class LightGCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(N, D)
        self.convs = nn.ModuleList([gnn.LGConv() for _ in range(3)])

    def forward(self, edge_index: Tensor) -> Tensor:
        x, total = self.emb.weight, self.emb.weight / 4
        for conv in self.convs:
            x = conv(x, edge_index)
            total = total + x / 4
        return total


class WithoutFeatures(nn.Module):
    """PyG's example of RGCN."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.RGCNConv(N, W, KINDS, num_bases=2)])
        self.convs.extend([gnn.RGCNConv(W, W, KINDS, num_bases=2) for _ in range(2)])

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.convs[0](None, edge_index, edge_type).relu()
        for conv in self.convs[1:]:
            x = conv(x, edge_index, edge_type).relu()
        return x


class WritesLabels(Holds):
    """Known labels are added to some rows, as label propagation in UniMP does."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, D)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, edge_index: Tensor) -> Tensor:
        h = x.clone()
        h[mask] = h[mask] + self.emb(y[mask])
        h[:, 0] = 1.0
        return self.inner(h, edge_index)


class Decodes(Table):
    """The head reads the table again, on every rank."""

    def forward(self, edge_index: Tensor) -> Tensor:
        z = self.inner(self.emb.weight, edge_index)
        return (z @ self.emb.weight.t()).mean(-1)


class CountsSources(Holds):
    """Degrees over all edges, asked for between layers."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.inner.convs[0](x, edge_index)
        sources = degree(edge_index[0], h.size(0), dtype=h.dtype)
        return self.inner(h / (1 + sources).unsqueeze(-1), edge_index)


class NormalizesByHand(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        scale = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        scale[scale == float("inf")] = 0
        return self.inner(x, edge_index, scale[row] * scale[col])


class Normalizes(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        return self.inner(x, edges, weight)


class Undirected(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(x, to_undirected(edge_index, num_nodes=x.size(0)))


class ByHandOnOtherEdges(Holds):
    """Rows of hidden layers are read along edges that forward has made of the data."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = to_undirected(edge_index, num_nodes=N)
        scale = degree(row, N, dtype=x.dtype).clamp(min=1).rsqrt().unsqueeze(-1)
        h = self.inner(x, edge_index)
        h = h + scatter((h * scale)[row], col, 0, h.size(0))
        return self.inner(h, edge_index)


class ComparesFeatures(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        return self.inner(x, edge_index, F.cosine_similarity(x[row], x[col]))


class Numbers(Table):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(x + self.emb(torch.arange(x.size(0), device=x.device)), edge_index)


class BuildsMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        ones = torch.ones(edge_index.size(1), dtype=x.dtype)
        adj = torch.sparse_coo_tensor(edge_index, ones, (x.size(0), x.size(0)))
        for lin in self.lins:
            x = torch.spmm(adj, lin(x)).tanh()
        return x


class LooksUpTwice(Table):
    """As a leaf, and through the embedding."""

    def forward(self, ids: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(self.emb.weight + self.emb(ids), edge_index)


class WidthOfNodes(Holds):
    """A weight for features that are the numbers of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, D))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(x @ self.weight, edge_index)


class EdgesOfModes(Holds):
    """Trains on some edges and is evaluated on all, as link prediction does."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.all = GRAPH.edge_index[:, ::2], GRAPH.edge_index

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.some if self.training else self.all)


class OneMoreEdgeSet(Holds):
    """Edges of the module beside those that are passed."""

    def __init__(self) -> None:
        super().__init__()
        self.more = GRAPH.edge_index[:, 3::2].flip(0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(self.inner(x, self.more), edge_index)


def on_edges(net: Any, data: Data) -> Any:
    return net(data.edge_index)


def on_nothing(net: Any, data: Data) -> Any:
    return net()


def on_x(net: Any, data: Data) -> Any:
    return net(data.x)


def on_types(net: Any, data: Data) -> Any:
    return net(data.edge_index, data.edge_index[0] % KINDS)


def on_labels(net: Any, data: Data) -> Any:
    numbers = torch.arange(N)
    return net(data.x, numbers % 4, numbers % 3 == 0, data.edge_index)


def on_few_labels(net: Any, data: Data) -> Any:
    numbers = torch.arange(N)
    return net(data.x, numbers % 4, numbers == N // 2, data.edge_index)


def on_ids(net: Any, data: Data) -> Any:
    return net(torch.arange(N) * 7 % N, data.edge_index)


def on_one_hot(net: Any, data: Data) -> Any:
    return net(torch.eye(N), data.edge_index)


NETS: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "a table": (Table, on_edges),
    "numbers made in forward": (LooksUp, on_edges),
    "features made in forward": (Ones, on_edges),
    "buffers": (OwnBuffers, on_nothing),
    "a graph of the module": (OwnGraph, on_nothing),
    "edges of the module": (OwnEdges, on_x),
    "a graph of the script": (OfTheScript, on_x),
    "a weight an edge": (EdgeWeights, on_features),
}
MORE: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "edges of each mode": (EdgesOfModes, on_x),
    "edges beside edges": (OneMoreEdgeSet, on_features),
    "rows beside features": (Rows, on_features),
    "some rows written": (WritesLabels, on_labels),
    "one row written": (WritesLabels, on_few_labels),
    "a sparse matrix of the module": (OwnMatrix, on_nothing),
    "LightGCN": (LightGCN, on_edges),
    "no features": (WithoutFeatures, on_types),
    "a table in the head": (Decodes, on_edges),
    "degrees of sources": (CountsSources, on_features),
    "norm by hand": (NormalizesByHand, on_features),
    "gcn_norm": (Normalizes, on_features),
    "both directions": (Undirected, on_features),
    "weights of features": (ComparesFeatures, on_features),
    "messages on other edges": (ByHandOnOtherEdges, on_features),
    "numbers of rows": (Numbers, on_features),
    "a matrix of edges": (BuildsMatrix, on_features),
    "a table and its rows": (LooksUpTwice, on_ids),
    "as many features as nodes": (WidthOfNodes, on_one_hot),
}


@pytest.mark.some_cases(1)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [*NETS, *MORE])
def test_what_a_module_holds_trains_as_plainly(name: str) -> None:
    assert_alike(*(NETS | MORE)[name], pipelined_module="net")


def difference(one: Fits, other: Fits) -> float:
    return float((weights(one) - weights(other)).abs().max())


@pytest.mark.some_cases(2)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", NETS)
def test_in_chunks_it_counts_as_arguments(name: str) -> None:
    make, call = NETS[name]
    options = {"num_chunks": 3, "staleness": "constant"}
    found = fit(make, call, pipelined_module="net", **options)
    oracle = fit(make, call, pipelined_module="net.inner", **options)
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
        "no features",
        "a table in the head",
        "a table and its rows",
    ],
)
def test_on_two_ranks_it_trains_as_on_one(name: str, place: str) -> None:
    options = {"pipelined_module": "net", **PLACES[place]}
    make, call = (NETS | MORE)[name]
    num_chunks = 2 if place == "two stages" else 1
    both = fit(make, call, num_chunks=num_chunks, num_stages=2, **options)
    alone = fit(make, call, num_chunks=num_chunks, pipelined_module="net")
    assert difference(both, alone) < 1e-10


@pytest.mark.usefixtures("double")
def test_a_table_is_on_the_stage_that_reads_it(tmp_path: Path) -> None:
    """Rank 1 has no row of it, nor of its state; a checkpoint has all of both."""
    torch.manual_seed(0)
    module = Watches(Table(), on_edges)
    loader = DataLoader([graph()], batch_size=None)
    saving = ModelCheckpoint(tmp_path, save_last=True)
    piped = {"num_chunks": 3, "pipelined_module": "net"}
    options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": 3}
    trainer = quiet_trainer(2, piped, **options)
    trainer.fit(module, loader, loader)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    torch.testing.assert_close(saved["state_dict"]["net.emb.weight"], module.net.emb.weight)
    assert any(
        state["exp_avg"].shape == (N, D) for state in saved["optimizer_states"][0]["state"].values()
    )
    rows = [(tmp_path / f"rows{rank}").read_text() for rank in range(2)]
    assert rows == [str(N), "0"]


class Watches(Fits):
    def on_train_batch_end(self, *_: Any) -> None:
        folder = Path(self.trainer.checkpoint_callback.dirpath)  # type: ignore
        rows = folder / f"rows{self.global_rank}"
        with as_held(self.trainer):
            rows.write_text(str(self.net.emb.weight.data.size(0)))


def train(
    kind: type[Fits],
    make: Callable[[], nn.Module],
    call: Forward,
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


@pytest.mark.usefixtures("double")
def test_a_buffer_that_changes_is_read_anew() -> None:
    """As an argument that changes does: the step on new features is exact."""

    class Changes(Fits):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                self.net.x += 1.0

    def make() -> nn.Module:
        net = OwnBuffers()
        net.x = GRAPH.x.clone()
        return net

    plain, exact, chunked = (train(Changes, make, on_nothing, n) for n in (0, 1, 3))
    assert difference(exact, plain) < 1e-9
    assert difference(chunked, plain) < 0.5


class Remakes(Fits):
    """Gives the module another tensor in each of the first epochs."""

    def on_train_epoch_start(self) -> None:
        self.net.data = graph(x=GRAPH.x + self.current_epoch // 2)


@pytest.mark.usefixtures("double")
def test_a_graph_in_place_of_another_is_read() -> None:
    plain, exact = (train(Remakes, OwnGraph, on_nothing, n) for n in (0, 1))
    assert difference(exact, plain) < 1e-9


@pytest.mark.usefixtures("double")
def test_a_sparse_table_trains_as_plainly() -> None:
    """With an optimizer for sparse gradients."""

    class Sparse(Fits):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.02)

    plain, exact, chunked = (train(Sparse, LooksUpSparse, on_edges, n) for n in (0, 1, 3))
    assert difference(exact, plain) < 1e-9
    assert difference(chunked, plain) < 0.5


class LooksUpSparse(LooksUp):
    def __init__(self) -> None:
        super().__init__(sparse=True)


class Moves(Fits):
    """Moves the features in an epoch, and validates on a smaller graph as well."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        data.x = GRAPH.x + (self.current_epoch > 1)
        return super().training_step(data, batch_idx)

    def validation_step(self, data: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 0:
            super().validation_step(data, batch_idx)
        else:
            found = self.call(self.net, data)
            own = type(self.net).forward(self.net, data.x, data.edge_index)
            torch.testing.assert_close(found, own, rtol=0, atol=1e-10)


@pytest.mark.some_cases(1)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("make", [ComparesFeatures, NormalizesByHand, Rows])
def test_results_on_data_follow_the_data(make: Callable[[], nn.Module]) -> None:
    inside = GRAPH.edge_index[:, (GRAPH.edge_index < 40).all(0)]
    small = graph(x=GRAPH.x[:40], edge_index=inside)
    small.edge_attr = None
    sizes = [graph(), graph() if make is Rows else small]
    loaders = [DataLoader([one], batch_size=None) for one in sizes]

    plain, exact, warm = (train(Moves, make, on_features, n, loaders=loaders) for n in (0, 1, 3))
    assert difference(exact, plain) < 1e-9
    warm.eval()
    last = graph(x=GRAPH.x)
    with torch.no_grad():
        torch.testing.assert_close(warm.outputs[0], on_features(warm.net, last))


class Remembers(OwnBuffers):
    def forward(self) -> Tensor:
        h = self.inner(self.x, self.edge_index)
        self.x.copy_(h.detach())
        return h


class Clamps(Table):
    def forward(self, edge_index: Tensor) -> Tensor:
        self.emb.weight.data.clamp_(-0.1, 0.1)
        return self.inner(self.emb.weight, edge_index)


class Assigns(Table):
    def forward(self, edge_index: Tensor) -> Tensor:
        self.emb.weight.data = F.normalize(self.emb.weight.data)
        return self.inner(self.emb.weight, edge_index)


class FillsRows(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        shift = torch.zeros(N, D)
        shift[x > 0] = x[x > 0]
        return self.inner(x + shift, edge_index)


class WritesUnderAView(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x.clone()
        first = h[:, :1]
        h[x > 0] = 0.0
        return self.inner(h + first, edge_index)


class WritesToAView(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x.clone()
        h[:, 0][x[:, 1] > 0] = 0.0
        return self.inner(h, edge_index)


class WritesToABuffer(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.count.view(-1)[0] = 1.0
        return self.inner(x, edge_index)


class WritesToTheSame(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x.contiguous()
        h[x > 0] = 0.0
        return self.inner(h, edge_index)


@pytest.mark.some_cases(3)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("make", "call", "found"),
    [
        (Remembers, on_nothing, "'module.x', which is no argument"),
        (Clamps, on_edges, "'module.emb.weight', which is no argument"),
        (Assigns, on_edges, "does not support assignment of data"),
        (FillsRows, on_features, "a write to"),
        (WritesUnderAView, on_features, "shares memory"),
        (WritesToAView, on_features, "shares memory"),
        (WritesToTheSame, on_features, "shares memory"),
        (WritesToABuffer, on_features, "shares memory"),
    ],
)
def test_writes_that_others_would_see_are_refused(
    make: Callable[[], nn.Module], call: Forward, found: str
) -> None:
    """In one chunk too, where no values are compared."""
    with pytest.raises(UnsupportedError, match=found):
        fit(make, call, num_chunks=1, pipelined_module="net")


class Replaces(Fits):
    """Replaces a tensor in the graph of the module."""

    def on_train_epoch_start(self) -> None:
        self.net.data.x = GRAPH.x + self.current_epoch // 2


class Follows(Fits):
    """A hook changes the gradient of the table."""

    def __init__(self, net: Any, call: Forward) -> None:
        super().__init__(net, call)
        net.emb.weight.register_hook(lambda grad: grad * (torch.arange(N) % 2).unsqueeze(-1))


class Thaws(Fits):
    def on_train_epoch_start(self) -> None:
        self.net.emb.weight.requires_grad_(self.current_epoch > 0)


@pytest.mark.some_cases(1)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("kind", "make", "call"), [(Replaces, OwnGraph, on_nothing), (Follows, Table, on_edges)]
)
def test_changes_from_outside_count(kind: type[Fits], make: Any, call: Forward) -> None:
    assert difference(train(kind, make, call, 1), train(kind, make, call, 0)) < 1e-9


@pytest.mark.usefixtures("double")
def test_a_table_that_another_stage_holds_is_thawed() -> None:
    """The new trace is the same on the rank that has no row of it."""
    both = train(Thaws, Table, on_edges, num_chunks=1, num_stages=2)
    assert difference(both, train(Thaws, Table, on_edges, num_chunks=0)) < 1e-9


class Accumulates(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.inner(x.cumsum(0) / N, edge_index)


class Encodes(Fits):
    """Features get a gradient in the second half."""

    def __init__(self, net: nn.Module, call: Forward) -> None:
        super().__init__(net, call)
        self.lin = nn.Linear(D, D)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        self.lin.requires_grad_(self.current_epoch > 1)
        return super().training_step(graph(x=self.lin(data.x)), batch_idx)


@pytest.mark.usefixtures("double")
def test_results_on_features_with_a_gradient_are_no_data() -> None:
    with pytest.raises(UnsupportedError, match="the same values on chunks"):
        train(Encodes, Accumulates, on_features, 3)


class DrawsOnData(Holds):
    """Random numbers under a name that does not say so, beside what must be folded."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        mixed = F.gumbel_softmax(x)
        return self.inner(mixed, to_undirected(edge_index, num_nodes=mixed.size(0)))


def test_random_numbers_on_data_are_not_kept() -> None:
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match="num_chunks=1"):
        torch.manual_seed(0)
        fit(DrawsOnData, num_chunks=3, pipelined_module="net")
    torch.set_rng_state(state)


class WritesAnArgument(Holds):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x[:, 0] = 1.0
        return self.inner(x, edge_index)


def test_rows_of_an_argument_are_not_written() -> None:
    with pytest.raises(UnsupportedError, match="an assignment to some rows of a tensor"):
        fit(WritesAnArgument, num_chunks=3, pipelined_module="net")


HABITS = {
    "a row of weights for each node: `self.emb.weight`, a parameter, LightGCN": (
        "as plainly; the rows are on the stages that read them",
        test_what_a_module_holds_trains_as_plainly,
        *("a table", "numbers made in forward", "rows beside features", "LightGCN"),
        "a table in the head",
    ),
    "features, edges or a `Data` that the module or the script holds": (
        "as plainly; cut as arguments are",
        test_what_a_module_holds_trains_as_plainly,
        *("buffers", "a graph of the module", "edges of the module", "a graph of the script"),
        *("edges of each mode", "edges beside edges"),
    ),
    "a sparse matrix that the module holds or builds of edges (NGCF)": (
        "as plainly; each product is a layer",
        test_what_a_module_holds_trains_as_plainly,
        *("a sparse matrix of the module", "a matrix of edges"),
    ),
    "a weight for each edge in the module": (
        "as plainly",
        test_what_a_module_holds_trains_as_plainly,
        "a weight an edge",
    ),
    "degrees, `gcn_norm`, `to_undirected`, edge weights of features, in `forward`": (
        "as plainly; computed once, on the whole graph on each device",
        test_what_a_module_holds_trains_as_plainly,
        *("degrees of sources", "norm by hand", "gcn_norm", "both directions"),
        *("weights of features", "messages on other edges"),
    ),
    "`RGCNConv` without features": (
        "as plainly",
        test_what_a_module_holds_trains_as_plainly,
        "no features",
    ),
    "known labels written to some rows: `h[mask] = ...`": (
        "as plainly",
        test_what_a_module_holds_trains_as_plainly,
        *("some rows written", "one row written"),
    ),
    "rows of an argument written to: `x[:, 0] = 1`": (
        "refused: write to `x.clone()`",
        test_rows_of_an_argument_are_not_written,
    ),
}
