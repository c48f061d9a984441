"""Several edge sets over the same nodes, in arguments or dicts: models as users write them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.errors import GraphError, UnsupportedError
from lightning_gnnpipe.layers import check_support
from lightning_gnnpipe.staleness import StalenessMethod
from tests.helpers.alike import Fits, assert_alike, net_of
from tests.helpers.engines import one_process_engine
from tests.helpers.reference import StaleOracle
from tests.passing.test_convs import assert_same, assert_step, move, next_order

pytestmark = pytest.mark.usefixtures("double")

N, D = 26, 8
CHUNKS = torch.arange(N) * 7 % N // 9
ONE_CHUNK = torch.zeros(N, dtype=torch.int64)
RELATIONS = [("a", "pos", "a"), ("a", "neg", "a")]
BETWEEN = [("a", "pos", "b"), ("b", "neg", "a")]

Batch = dict[str, Tensor]


def edges(count: int, stride: int) -> Tensor:
    number = torch.arange(count)
    source = (number * stride + number // 7) % (N - 1)
    return torch.stack([source, (number * 5 + number // 3 + stride) % (N - 2)])


def make_batch(num_neg: int = 44) -> Batch:
    return {
        "x": torch.randn(N, D),
        "pos_edge_index": edges(61, 11),
        "neg_edge_index": edges(num_neg, 3),
        "pos_edge_weight": torch.rand(61) + 0.5,
        "neg_edge_weight": torch.rand(num_neg) + 0.5,
    }


class Signed(nn.Module):
    """What PyG's SignedGCN does."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(D, True), (D // 2, False), (D // 2, False)]
        self.convs = nn.ModuleList(gnn.SignedConv(width, D // 2, one) for width, one in widths)

    def forward(self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, pos_edge_index, neg_edge_index).relu()
        return x


class Weighted(nn.Module):
    """One kind of layer for each edge set, weights that are changed on the way, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(3))
        self.neg = nn.ModuleList(gnn.GATConv(D, D, edge_dim=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in range(3))
        self.score = nn.Linear(1, 1)

    def forward(
        self,
        x: Tensor,
        pos_edge_index: Tensor,
        neg_edge_index: Tensor,
        pos_edge_weight: Tensor,
        neg_edge_weight: Tensor,
    ) -> Tensor:
        score = self.score(neg_edge_weight[:, None]).sigmoid()  # crosses the cuts
        for pos, neg, norm in zip(self.pos, self.neg, self.norms, strict=True):
            x = pos(x, pos_edge_index, pos_edge_weight) - neg(x, neg_edge_index, score)
            x = norm(x).tanh()
        return x


class Dicts(nn.Module):
    """Layers of one type of nodes; what they return goes on as a dict, or is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (gnn.GATConv, gnn.SAGEConv), (gnn.GCNConv, gnn.GATConv)
        self.convs = nn.ModuleList(
            gnn.HeteroConv({key: kind(D, D) for key, kind in zip(RELATIONS, pair, strict=True)})
            for pair in (*kinds, kinds[0])
        )

    def forward(self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        sets = dict(zip(RELATIONS, (pos_edge_index, neg_edge_index), strict=True))
        first, second, third = self.convs
        x_dict = second(first({"a": x}, sets), sets)
        x_dict = {key: rows.tanh() for key, rows in x_dict.items()}
        return third(x_dict, sets)["a"]


class Homogeneous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv((D, D), D) for _ in range(3))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, *rest = self.convs
        x = self.norm(first(x, edge_index)).relu()
        for conv in rest:
            x = x + conv(x, edge_index).tanh()
        return x


class OfTypes(nn.Module):
    """What PyG's to_hetero writes, code of torch.fx; a second type has as many nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gnn.to_hetero(Homogeneous(), (["a", "b"], [*RELATIONS, *BETWEEN]))

    def forward(self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        both = pos_edge_index, neg_edge_index
        sets = dict(zip([*RELATIONS, *BETWEEN], both * 2, strict=True))
        out = self.net({"a": x, "b": x.roll(3, 1)}, sets)
        return torch.cat([out["a"], out["b"]], -1)


def given_dicts() -> nn.Module:
    def forward(net: Any, x_dict: Batch, edge_index_dict: dict[Any, Tensor]) -> Tensor:
        return net.net(x_dict["a"], *edge_index_dict.values())

    return net_of(nn.Module, forward, net=Dicts)()


GivenData = net_of(
    nn.Module,
    lambda self, data: self.net(data.x, data.pos_edge_index, data.neg_edge_index),
    net=Signed,
)
MADE: dict[str, Callable[[Any], Any]] = {
    "data": lambda batch: Data(**batch),
    "x_dict": lambda batch: {"a": batch["x"]},
    "edge_index_dict": lambda batch: {key: batch[f"{key[1]}_edge_index"] for key in RELATIONS},
}


def arguments(net: nn.Module, batch: Any) -> dict[str, Any]:
    """Return what `net` is called with."""
    _, *names = inspect.signature(type(net).forward).parameters
    return {name: MADE[name](batch) if name in MADE else batch[name] for name in names}


def call(net: nn.Module, batch: Any) -> Tensor:
    return net(**arguments(net, batch))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("num_neg", [44, 61])
@pytest.mark.parametrize(
    ("partition", "recompute"), [(CHUNKS, False), (CHUNKS, True), (ONE_CHUNK, False)]
)
@pytest.mark.parametrize(
    "make",
    [Weighted, GivenData, OfTypes, given_dicts],
)
def test_p1_several_edge_sets_train_as_in_pyg(
    make: Any, partition: Tensor, recompute: bool, num_neg: int
) -> None:
    """An exact step equals plain PyG, a step in chunks behind it and inference do as well."""
    net = make()
    given, plain = arguments(net, make_batch(num_neg)), copy.deepcopy(net)
    check_support(net, num_chunks=3)
    engine = one_process_engine(net, partition=partition, recompute=recompute)
    expected = plain(**given)
    assert_step(engine, given, net, expected, plain)
    engine.set_step(step_index=2)
    found = engine.forward((), given)
    assert_same(found.detach(), expected.detach())
    found.sum().backward()
    net.eval()
    with torch.no_grad():
        assert_same(engine.forward((), given), net(**given))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [OfTypes, Dicts])
def test_p2_stale_steps_equal_the_oracle(make: Any, recompute: bool) -> None:
    net = make()
    given = arguments(net, make_batch())
    oracle = StaleOracle(net, CHUNKS, cross_chunk_grad_scale=2.0)
    method = StalenessMethod(linear_scale=2.0, message_scale=2.0)
    engine = one_process_engine(net, partition=CHUNKS, method=method, recompute=recompute)
    assert_step(engine, given, net, oracle.exact(*given.values()))
    for _ in range(3):
        move(net, 0.1)
        assert_step(engine, given, net, oracle.chunked(*given.values(), order=next_order(engine)))


@pytest.mark.parametrize("make", [Weighted, OfTypes])
def test_p1_several_edge_sets_on_two_stages(make: Any) -> None:
    assert_alike(make, call, Data(**make_batch()), num_stages=2)


@pytest.mark.parametrize("make", [Weighted, Dicts])
def test_a_forecast_of_several_edge_sets(make: Any) -> None:
    data = FullGraphDataModule(Data(**make_batch()))
    plan = GNNPipeStrategy(num_chunks=4).plan(Fits(make(), call), data, num_stages=2)
    assert plan.num_edges == sum(plan.chunk_edges) == 61 + 44


conv = partial(net_of, nn.Module, conv=lambda: gnn.GCNConv(D, D))
# Its arguments do not tell what is what; its weight could be of either edge set.
Anonymous = conv(lambda net, x, first, second: net.conv(x, first) + net.conv(x, second))
Unclear = conv(
    lambda net, x, pos_edge_index, neg_edge_index, edge_weight: (
        net.conv(x, pos_edge_index, edge_weight) + net.conv(x, neg_edge_index)
    )
)


class Crossed(Weighted):
    """Its weights are those of the other edge set, of the same size."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        named |= {"pos_edge_weight": named["neg_edge_weight"]}
        return super().forward(x, *others, **named)


class CountsNodes(gnn.MessagePassing):
    """Lets PyG count the nodes in each of two edge sets."""

    def forward(self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        pos, neg = (add_self_loops(edges)[0] for edges in (pos_edge_index, neg_edge_index))
        return self.propagate(pos, x=x) - self.propagate(neg, x=x)


Counting = net_of(Signed, Signed.forward, convs=lambda: nn.ModuleList([CountsNodes()]))
POS, NEG = "pos_edge_index", "neg_edge_index"
BOTH = {POS: POS, NEG: NEG}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (Anonymous, {"first": POS, "second": NEG}, r"which arguments .* edges.*'first', 'second'"),
        (Unclear, {**BOTH, "edge_weight": "pos_edge_weight"}, "'edge_weight' to be named after"),
        (Signed, {POS: POS, NEG: "floats"}, r"'neg_edge_index' to hold integers .*float64"),
        (Counting, BOTH, r"num_nodes=x.size"),
        (Crossed, {name: name for name in make_batch()}, "belongs to one edge set"),
    ],
)
def test_p4_unclear_edge_sets_are_refused(make: Any, given: dict[str, str], text: str) -> None:
    batch = make_batch(num_neg=61)
    batch["floats"] = batch[NEG].double()
    arguments = {name: batch[key] for name, key in {"x": "x", **given}.items()}
    with pytest.raises((GraphError, UnsupportedError), match=text):
        one_process_engine(make(), partition=CHUNKS).forward((), arguments)


EXTRAS = [
    *({"a": N, "b": N}, {"a": None}, {"a": torch.tensor(2.0)}),
    {"a": torch.arange(5), "b": torch.arange(7)},
]


class WithMore(OfTypes):
    """Takes one more dict by type of nodes."""

    def forward(self, more: Any, x_dict: Batch, edge_index_dict: dict[Any, Tensor]) -> Tensor:
        return self.net(x_dict, edge_index_dict)["b"]


def of_types(num_b: int) -> dict[str, Any]:
    pos, neg = edges(61, 11) % num_b, edges(44, 3) % num_b
    sets = dict(zip([*RELATIONS, *BETWEEN], (pos, neg) * 2, strict=True))
    return {
        "x_dict": {"a": torch.randn(N, D), "b": torch.randn(num_b, D)},
        "edge_index_dict": sets,
    }


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("extra", EXTRAS)
def test_p1_types_of_nodes_of_the_same_size(extra: Any) -> None:
    net, given = WithMore(), of_types(N) | {"more": extra}
    engine = one_process_engine(net, partition=CHUNKS)
    assert_step(engine, given, net, net(**given))


@pytest.mark.parametrize("batch", [{}, {"batch": torch.arange(N) // 20}])
def test_p4_types_of_nodes_that_differ_in_size_are_refused(batch: Batch) -> None:
    class WithBatch(WithMore):
        def forward(self, *args: Any, batch: Tensor | None = None, **kwargs: Any) -> Tensor:
            return super().forward(None, *args, **kwargs)

    engine = one_process_engine(WithBatch(), partition=ONE_CHUNK)
    with pytest.raises(UnsupportedError, match=r"same size .*'a' of 26 rows, 'b' of 5.*to_homogen"):
        engine.forward((), of_types(5) | batch)


TYPES = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])


@pytest.mark.parametrize(
    ("conv", "text"),
    [
        (gnn.HANConv(D, D, TYPES), "HANConv: .*several types.*RGCNConv"),
        (gnn.HGTConv(D, D, TYPES), "HGTConv: .*several types.*RGCNConv"),
        (gnn.HeteroConv({("a", "to", "b"): gnn.SAGEConv(D, D)}), "HeteroConv: .*several types"),
        (gnn.HeteroConv({RELATIONS[0]: gnn.SAGEConv(D, D)}, aggr="max"), "HeteroConv: .*='max'"),
    ],
)
def test_p4_layers_that_take_dicts_are_refused_where_not_exact(conv: nn.Module, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        check_support(nn.ModuleList([conv]), num_chunks=2)


def test_p1_one_chunk_runs_what_chunks_refuse() -> None:
    def forward(net: Any, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        return net.conv(
            {"a": x}, dict(zip(RELATIONS, (pos_edge_index, neg_edge_index), strict=True))
        )["a"]

    net = net_of(nn.Module, forward, conv=lambda: gnn.HGTConv(D, D, (["a"], RELATIONS)))()
    engine = one_process_engine(net, partition=ONE_CHUNK)
    given = arguments(net, make_batch())
    assert_step(engine, given, net, net(**given))


def test_a_change_of_one_edge_set_is_a_change_of_the_graph() -> None:
    net, batch = Signed(), make_batch()
    engine = one_process_engine(net, partition=CHUNKS)
    for stride in (3, 9):
        given = {**arguments(net, batch), "neg_edge_index": edges(44, stride)}
        assert_step(engine, given, net, net(**given))
