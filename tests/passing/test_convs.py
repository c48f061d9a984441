"""P4: every layer that PyG exports is exact on chunks and on shards, or refused by name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, degree, get_laplacian

from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.layers import check_support, find_convs, find_layers, intercept
from lightning_gnnpipe.layers.support import EXACT_AGGREGATIONS, EXACT_CONVS, REFUSED_CONVS
from lightning_gnnpipe.passing import MessageContext
from tests.helpers.cases import name_of
from tests.helpers.convs import (
    BY_SELF_CHECK,
    CASES,
    NUM_TYPES,
    REFUSED,
    ConvCase,
    ConvNet,
    D,
)
from tests.helpers.engines import one_process_engine
from tests.helpers.orders import order_of_step
from tests.helpers.reference import StaleOracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:We do not recommend using the non-optimized CPU"),
    pytest.mark.usefixtures("double"),
]

N = 23
TOLERANCE = 1e-10


class DegreesAtSources(MessagePassing):
    """The GCN layer of PyG's tutorial on message passing, which reads degrees in `message`."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(D, D, bias=False)
        self.bias = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        root = degree(edge_index[1], x.size(0), dtype=x.dtype).pow(-0.5).unsqueeze(-1)
        return self.propagate(edge_index, x=self.lin(x), root=root) + self.bias

    def message(self, x_j: Tensor, root_i: Tensor, root_j: Tensor) -> Tensor:
        return root_i * root_j * x_j


class ConcatUpdate(MessagePassing):
    """Reads its own rows again in `update`, unsuffixed."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(2 * D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, size=(x.size(0), x.size(0)))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j - x_i

    def update(self, aggr_out: Tensor, x: Tensor) -> Tensor:
        return self.lin(torch.cat([aggr_out, x], dim=-1))


class TwoArguments(MessagePassing):
    """Different tensors on the source and on the target side, and raw indices in the message."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.left, self.right = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, a=self.left(x), b=self.right(x))

    def message(self, a_j: Tensor, b_i: Tensor, index: Tensor) -> Tensor:
        return torch.tanh(a_j) * b_i + index.new_ones(index.size(0), 1)


class Normalised(MessagePassing):
    """Normalises its edges without the number of nodes, which PyG counts by the largest index."""

    def __init__(self, normalise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.lin, self.normalise = nn.Linear(D, D), normalise

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, weight = self.normalise(edge_index)
        return self.propagate(edges, x=self.lin(x), weight=weight)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class NormalisedByDegrees(Normalised):
    def __init__(self) -> None:
        super().__init__(lambda edges: gcn_norm(edges, dtype=torch.float64))


class NormalisedByLaplacian(Normalised):
    def __init__(self) -> None:
        super().__init__(
            lambda edges: get_laplacian(edges, normalization="sym", dtype=torch.float64)
        )


OWN = [ConvCase("own tutorial", DegreesAtSources), ConvCase("own update", ConcatUpdate)]
OWN += [ConvCase("own two", TwoArguments), ConvCase("own norm", NormalisedByDegrees)]
OWN += [ConvCase("own laplacian", NormalisedByLaplacian)]


def random_edges() -> Tensor:
    """Return a directed graph with loops, multi-edges and two isolated nodes, the last of them."""
    number = torch.arange(56)
    source = (number * 7 + number // 9) % (N - 1)
    target = (number * 5 + number // 4 * 3 + 1) % (N - 1)
    keep = (source != 4) & (target != 4)
    loops = torch.tensor([[2, 9], [2, 9]])
    return torch.cat([torch.stack([source, target])[:, keep], loops, loops[:, :1]], dim=1)


def other_edges() -> Tensor:
    """Return a second edge set over the same nodes, some of its edges in both."""
    number = torch.arange(41)
    return torch.stack([(number * 3 + number // 7) % (N - 3), (number * number + 2) % (N - 2)])


def make_batch(edge_index: Tensor | None = None, case: ConvCase | None = None) -> dict[str, Tensor]:
    """Return a graph with all that layers may need, by default of `random_edges`."""
    edge_index = random_edges() if edge_index is None else edge_index
    other = other_edges()
    more = {"other_edge_index": other, "other_edge_weight": torch.rand(other.size(1)) + 0.5}
    num_edges = edge_index.size(1)
    normal = torch.randn(N, 3)
    return {
        "x": torch.randn(N, D),
        "edge_index": edge_index,
        "edge_weight": torch.rand(num_edges) + 0.5,
        "edge_attr": torch.rand(num_edges, 3),
        "edge_type": torch.arange(num_edges) * 5 % NUM_TYPES,
        "node_type": torch.arange(N) * 2 % NUM_TYPES,
        "pos": torch.randn(N, 3),
        "normal": normal / normal.norm(dim=1, keepdim=True),
        **(more if case is not None and case.has_two else {}),
    }


PARTITION = torch.tensor([0] * 6 + [1] * 10 + [2] * 7)[torch.arange(N) * 3 % N]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def move(net: nn.Module, by: float) -> None:
    for number, parameter in enumerate(net.parameters()):
        size = torch.arange(parameter.numel()) + number
        parameter.data += by * torch.sin(size).view_as(parameter)


def assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def assert_step(
    engine: PipelineEngine,
    batch: dict[str, Tensor],
    net: nn.Module,
    expected: Tensor,
    plain: nn.Module | None = None,
) -> None:
    """Compare outputs and gradients of the engine's next step; `plain` has given what to expect."""
    weight = torch.sin(torch.arange(expected.numel())).view_as(expected)
    (expected * weight).sum().backward()
    grads = gradients(net if plain is None else plain)
    engine.set_step(step_index=engine.step.step_index + 1)
    output = engine.forward((), batch)
    (output * weight).sum().backward()
    assert_same(output.detach(), expected.detach())
    assert_same(gradients(net), grads)


def next_order(engine: PipelineEngine) -> tuple[int, ...]:
    """Return the order of the three chunks in the next `assert_step`."""
    return order_of_step(3, engine.step.step_index + 1, 0)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("exact_in_chunks", [False, True])
@pytest.mark.parametrize("case", [*CASES, *OWN], ids=name_of)
def test_p4_conv_in_the_pipeline_equals_the_oracle(case: ConvCase, exact_in_chunks: bool) -> None:
    """An exact step equals PyG, a step in chunks behind it as well; a stale one the oracle."""
    batch = make_batch(case=case)
    net, inputs = ConvNet(case, batch), list(batch.values())
    oracle = StaleOracle(net, PARTITION)
    options = {"exact_in_chunks": exact_in_chunks, "num_stages": 1 + exact_in_chunks}
    engine = one_process_engine(net, partition=PARTITION, **options)
    check_support(net, num_chunks=3)
    expected = oracle.exact(*inputs)
    assert_same(expected, net(*inputs))
    assert_step(engine, batch, net, expected)
    for by in (0.0, 0.1, 0.1):
        move(net, by)
        expected = oracle.chunked(*inputs, order=next_order(engine))
        if not by:
            assert_same(expected, net(*inputs))
        assert_step(engine, batch, net, expected)
    with torch.no_grad():
        assert_same(engine.forward((), batch), net(*inputs))


def test_every_conv_is_exact_or_refused() -> None:
    exported = {name for name in gnn.conv.__all__ if not name.startswith("_")}
    exact = {case.conv for case in CASES}
    assert not exact & REFUSED.keys()
    assert exact | REFUSED.keys() == {getattr(gnn.conv, name).__name__ for name in exported}
    assert {kind.__name__ for kind in REFUSED_CONVS} == REFUSED.keys() - {
        "MessagePassing",
        "MeshCNNConv",
    }
    listed = {kind.__name__ for kind in EXACT_CONVS}
    assert listed <= exact
    composed = exact - listed
    assert all(not issubclass(getattr(gnn, name), MessagePassing) for name in composed)


@pytest.mark.parametrize("name", [name for name, make in REFUSED.items() if make is not None])
def test_p4_other_convs_are_refused_by_name(name: str) -> None:
    make = REFUSED[name]
    assert make is not None
    with pytest.raises(UnsupportedError, match=f"(?s){name}.*(num_chunks=1|edge_index|GATConv)"):
        check_support(nn.ModuleDict({"conv": make()}), num_chunks=2)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("case", BY_SELF_CHECK, ids=lambda case: case.name)
def test_p4_uses_that_are_not_exact_are_refused_before_training(case: ConvCase) -> None:
    batch = make_batch(case=case)
    net = ConvNet(case, batch)
    check_support(net, num_chunks=3)
    engine = one_process_engine(net, partition=PARTITION)
    with pytest.raises(UnsupportedError, match=r"num_chunks=1|Pass edge_index.flip\(0\)"):
        engine.forward((), batch)


def test_every_exact_aggregation_has_a_case() -> None:
    built = {type(m) for case in CASES for m in case.make().modules()}
    assert built >= EXACT_AGGREGATIONS


def test_interception_leaves_no_trace() -> None:
    net = nn.ModuleList([gnn.GCNConv(D, D, cached=True), gnn.ChebConv(D, D, K=2)])
    before = {name: dict(conv.__dict__) for name, conv in find_convs(net).items()}
    plan = plan_from_assignment(make_batch()["edge_index"], N, PARTITION)
    with intercept(find_layers(net), MessageContext(None, plan)):
        assert net[0].cached is False
    after = {name: dict(conv.__dict__) for name, conv in find_convs(net).items()}
    assert {n: set(d) for n, d in before.items()} == {n: set(d) for n, d in after.items()}
    assert net[0].cached is True


def behind(layer: nn.Module) -> nn.Module:
    return nn.Sequential(gnn.GCNConv(D, D), layer)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (gnn.SAGEConv(D, D, aggr="lstm"), "LSTMAggregation"),
        (behind(nn.InstanceNorm1d(D)), "InstanceNorm1d"),
        (behind(nn.SyncBatchNorm(D)), "SyncBatchNorm"),
        (behind(nn.BatchNorm2d(D)), "BatchNorm2d"),
        (behind(gnn.HeteroBatchNorm(D, 2)), "HeteroBatchNorm"),
        (gnn.GCNConv(-1, D), "lazy layers, 'lin'"),
        (behind(spectral_norm(nn.Linear(D, D))), "power iteration"),
        (behind(old_spectral_norm(nn.Linear(D, D))), "power iteration"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_p4_what_is_not_exact_is_refused_by_name(layer: nn.Module, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        check_support(layer, num_chunks=2)


def test_one_chunk_needs_no_support() -> None:
    check_support(behind(nn.InstanceNorm1d(D)), num_chunks=1)


NUM_SHARDS, NUM_TURNS = 2, 8


def check_on_shards(case: ConvCase, rank: int) -> None:
    torch.manual_seed(0)
    batch = make_batch(case=case)
    net, inputs = ConvNet(case, batch), list(batch.values())
    oracle = StaleOracle(net, PARTITION)
    engine = one_process_engine(net, partition=PARTITION, rank=rank, num_shards=NUM_SHARDS)
    assert_step(engine, batch, net, oracle.exact(*inputs))
    move(net, 0.1)
    assert_step(engine, batch, net, oracle.chunked(*inputs, order=next_order(engine)))
    with torch.no_grad():
        assert_same(engine.forward((), batch), net(*inputs))


def run_rank(rank: int, folder: str, turn: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_SHARDS
    )
    failed = []
    for case in (*CASES, *OWN)[turn::NUM_TURNS]:
        try:
            check_on_shards(case, rank)
        except Exception:
            failed.append(f"{case.name}: {traceback.format_exc()[-1500:]}")
        dist.barrier()  # a failure on one rank is one on both, or a timeout
    dist.destroy_process_group()
    assert not failed, "\n".join(failed)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_p4_convs_are_exact_on_shards(turn: int, tmp_path: Path) -> None:
    """Each turn has other layers: there are several of each kind."""
    mp.start_processes(run_rank, (str(tmp_path), turn), nprocs=NUM_SHARDS, start_method="fork")
