"""P4: every layer on the list is exact on chunks; what is not on it is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.history import HistoryStore
from lightning_gnnpipe.passing import MessageContext, check_support, find_convs, intercept
from lightning_gnnpipe.passing.support import EXACT_AGGREGATIONS, EXACT_CONVS

D = 4
N = 11

# Directed, with a self-loop (2), a multi-edge (0 -> 1), an isolated node (10).
# Chunks: nodes 0-2 | 3-6 | 7-10.
EDGES = torch.tensor(
    [
        [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 0, 9, 5, 2, 6, 1, 8],
        [1, 1, 2, 2, 4, 5, 6, 3, 8, 9, 7, 0, 7, 2, 8, 5, 9, 9, 0],
    ]
)
ASSIGNMENT = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])


class TutorialGCN(MessagePassing):
    """The GCN layer that PyG's tutorial on message passing writes."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(D, D, bias=False)
        self.bias = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


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


class OwnStart(gnn.GCN2Conv):
    """GCN2Conv with its own input as the initial representation."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(D, 0.1, 0.5, 1, **kwargs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return super().forward(x, x, edge_index, edge_weight)


def mlp(width: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, D), nn.ReLU(), nn.Linear(D, D))


HISTOGRAM = torch.tensor([1, 3, 4, 3])
PLAIN: dict[str, Callable[[], MessagePassing]] = {
    "APPNP": lambda: gnn.APPNP(3, 0.1),
    "CGConv": lambda: gnn.CGConv(D),
    "EdgeConv": lambda: gnn.EdgeConv(mlp(2 * D)),
    "FiLMConv": lambda: gnn.FiLMConv(D, D),
    "GATConv": lambda: gnn.GATConv(D, D, heads=2),
    "GATConv-mean": lambda: gnn.GATConv(D, D, heads=2, concat=False, add_self_loops=False),
    "GATv2Conv": lambda: gnn.GATv2Conv(D, D, heads=2),
    "GATv2Conv-shared": lambda: gnn.GATv2Conv(D, D, share_weights=True),
    "GCNConv": lambda: gnn.GCNConv(D, D),
    "GCNConv-cached": lambda: gnn.GCNConv(D, D, cached=True),
    "GCNConv-improved": lambda: gnn.GCNConv(D, D, improved=True),
    "GCNConv-no-loops": lambda: gnn.GCNConv(D, D, add_self_loops=False),
    "GCNConv-no-norm": lambda: gnn.GCNConv(D, D, normalize=False),
    "GCN2Conv": OwnStart,
    "GCN2Conv-cached": lambda: OwnStart(cached=True, shared_weights=False),
    "GENConv": lambda: gnn.GENConv(D, D, norm="layer"),
    "GENConv-learned": lambda: gnn.GENConv(D, D, norm="layer", learn_t=True, msg_norm=True),
    "GENConv-power": lambda: gnn.GENConv(D, D, norm="layer", aggr="powermean"),
    "GINConv": lambda: gnn.GINConv(mlp(), train_eps=True),
    "GatedGraphConv": lambda: gnn.GatedGraphConv(D, num_layers=3),
    "GeneralConv": lambda: gnn.GeneralConv(D, D, attention=True, heads=2),
    "GraphConv": lambda: gnn.GraphConv(D, D),
    "GraphConv-max": lambda: gnn.GraphConv(D, D, aggr="max"),
    "LEConv": lambda: gnn.LEConv(D, D),
    "LGConv": lambda: gnn.LGConv(),
    "MFConv": lambda: gnn.MFConv(D, D),
    "MixHopConv": lambda: gnn.MixHopConv(D, D, powers=[0, 1, 2]),
    "PNAConv": lambda: gnn.PNAConv(
        D, D, ["mean", "max", "std"], ["identity", "amplification", "attenuation"], HISTOGRAM
    ),
    "PNAConv-fused": lambda: gnn.PNAConv(
        D, D, ["mean", "min", "max", "std"], ["identity", "amplification"], HISTOGRAM
    ),
    "ResGatedGraphConv": lambda: gnn.ResGatedGraphConv(D, D),
    "SAGEConv": lambda: gnn.SAGEConv(D, D),
    "SAGEConv-max": lambda: gnn.SAGEConv(D, D, aggr="max", project=True),
    "SAGEConv-several": lambda: gnn.SAGEConv(D, D, aggr=["mean", "max", "std"], normalize=True),
    "SAGEConv-median": lambda: gnn.SAGEConv(D, D, aggr=["median", "min", "mul", "var"]),
    "SAGEConv-quantile": lambda: gnn.SAGEConv(D, D, aggr=gnn.QuantileAggregation(0.4)),
    "SGConv": lambda: gnn.SGConv(D, D, K=2),
    "SGConv-cached": lambda: gnn.SGConv(D, D, K=2, cached=True),
    "SSGConv": lambda: gnn.SSGConv(D, D, alpha=0.1, K=2),
    "SimpleConv": lambda: gnn.SimpleConv(aggr="mean", combine_root="sum"),
    "TAGConv": lambda: gnn.TAGConv(D, D, K=2),
    "TransformerConv": lambda: gnn.TransformerConv(D, D, heads=2, beta=True),
    "own-tutorial": TutorialGCN,
    "own-update": ConcatUpdate,
    "own-two": TwoArguments,
}
WEIGHTED: dict[str, Callable[[], MessagePassing]] = {
    "GCNConv-weight": lambda: gnn.GCNConv(D, D),
    "GCN2Conv-weight": OwnStart,
    "GraphConv-weight": lambda: gnn.GraphConv(D, D),
    "LEConv-weight": lambda: gnn.LEConv(D, D),
    "TAGConv-weight": lambda: gnn.TAGConv(D, D, K=2),
    "APPNP-weight": lambda: gnn.APPNP(2, 0.1),
}
ATTRIBUTED: dict[str, Callable[[], MessagePassing]] = {
    "CGConv-edge": lambda: gnn.CGConv(D, dim=3),
    "GATConv-edge": lambda: gnn.GATConv(D, D, heads=2, edge_dim=3),
    "GATv2Conv-edge": lambda: gnn.GATv2Conv(D, D, edge_dim=3),
    "GENConv-edge": lambda: gnn.GENConv(D, D, norm="layer", edge_dim=3),
    "GINEConv": lambda: gnn.GINEConv(mlp(), edge_dim=3),
    "GeneralConv-edge": lambda: gnn.GeneralConv(D, D, in_edge_channels=3),
    "NNConv": lambda: gnn.NNConv(D, D, nn.Linear(3, D * D)),
    "PNAConv-edge": lambda: gnn.PNAConv(D, D, ["mean"], ["identity"], HISTOGRAM, edge_dim=3),
    "ResGatedGraphConv-edge": lambda: gnn.ResGatedGraphConv(D, D, edge_dim=3),
    "TransformerConv-edge": lambda: gnn.TransformerConv(D, D, heads=2, edge_dim=3),
}
CASES = [
    *((name, make, None) for name, make in PLAIN.items()),
    *((name, make, "weight") for name, make in WEIGHTED.items()),
    *((name, make, "attr") for name, make in ATTRIBUTED.items()),
]


class TwoLayers(nn.Module):
    def __init__(self, make: Callable[[], MessagePassing]) -> None:
        super().__init__()
        self.first, self.second = make(), make()


def run(module: TwoLayers, x: Tensor, edge_index: Tensor, extra: tuple[Tensor, ...]) -> Tensor:
    hidden = module.first(x, edge_index, *extra)
    width = hidden.size(-1) // D * D
    return module.second(
        torch.tanh(hidden[:, :width].reshape(len(x), -1, D).sum(1)), edge_index, *extra
    )


@pytest.fixture(autouse=True)
def double() -> object:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def extra_of(kind: str | None) -> tuple[Tensor, ...]:
    if kind is None:
        return ()
    return (
        (torch.rand(EDGES.size(1)) + 0.5,) if kind == "weight" else (torch.randn(EDGES.size(1), 3),)
    )


@pytest.mark.parametrize(("name", "make", "kind"), CASES, ids=[case[0] for case in CASES])
def test_p4_conv_on_chunks_equals_conv_on_the_graph(
    name: str, make: Callable[[], MessagePassing], kind: str | None
) -> None:
    """Once an exact pass has filled the histories, a pass in chunks gives what the graph gives."""
    module = TwoLayers(make)
    x, extra = torch.randn(N, D), extra_of(kind)
    with torch.no_grad():
        edges = EDGES
        fresh = TwoLayers(make)
        fresh.load_state_dict(module.state_dict())
        expected = run(fresh, x, edges, extra)
        plan = plan_from_assignment(edges, N, ASSIGNMENT)
        store = HistoryStore(N, plan.num_chunks)
        context = MessageContext(store, plan.whole.chunks[0])
        for chunks in (plan.whole.chunks, plan.chunks, plan.chunks[::-1]):
            found = torch.full_like(expected, float("nan"))
            with intercept(find_convs(module), context):
                for chunk in chunks:
                    nodes = plan.perm[chunk.start : chunk.end]
                    ids = plan.edge_perm[chunk.edge_start : chunk.edge_end]
                    context.enter(chunk, 0)
                    found[nodes] = run(
                        module, x[nodes], chunk.edge_index, tuple(t[ids] for t in extra)
                    )
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_every_exact_conv_has_a_case() -> None:
    built = {kind for _, make, _ in CASES for kind in type(make()).__mro__}
    assert built >= EXACT_CONVS


def test_every_exact_aggregation_has_a_case() -> None:
    built = {type(m) for _, make, _ in CASES for m in make().modules()}
    assert built >= EXACT_AGGREGATIONS


def test_interception_leaves_no_trace() -> None:
    module = TwoLayers(PLAIN["GCNConv-cached"])
    before = {name: dict(conv.__dict__) for name, conv in find_convs(module).items()}
    plan = plan_from_assignment(EDGES, N, ASSIGNMENT)
    context = MessageContext(None, plan.whole.chunks[0])
    with intercept(find_convs(module), context):
        assert module.first.cached is False
    after = {name: dict(conv.__dict__) for name, conv in find_convs(module).items()}
    assert {n: set(d) for n, d in before.items()} == {n: set(d) for n, d in after.items()}
    assert module.first.cached is True


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (gnn.GENConv(D, D), "BatchNorm"),
        (gnn.ChebConv(D, D, K=2), "ChebConv"),
        (gnn.SAGEConv(D, D, aggr="lstm"), "LSTMAggregation"),
        (gnn.GCNConv(D, D, flow="target_to_source"), "target_to_source"),
        (nn.Sequential(gnn.GCNConv(D, D), gnn.LayerNorm(D)), "mode='graph'"),
        (nn.Sequential(gnn.GCNConv(D, D), nn.BatchNorm1d(D)), "BatchNorm1d"),
        (nn.Sequential(gnn.GCNConv(D, D), gnn.GraphNorm(D)), "GraphNorm"),
        (nn.Sequential(gnn.GCNConv(D, D), gnn.PairNorm()), "PairNorm"),
        (nn.Sequential(gnn.GCNConv(D, D), gnn.InstanceNorm(D)), "InstanceNorm"),
        (nn.Sequential(gnn.GCNConv(D, D), gnn.MeanAggregation()), "pools"),
        (gnn.GCNConv(-1, D), "not initialized"),
        (nn.Sequential(gnn.GCNConv(D, D), spectral_norm(nn.Linear(D, D))), "power iteration"),
        (nn.Sequential(gnn.GCNConv(D, D), old_spectral_norm(nn.Linear(D, D))), "power iteration"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_p4_what_is_not_exact_is_refused_by_name(layer: nn.Module, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        check_support(layer, num_chunks=2)


def test_one_chunk_needs_no_support() -> None:
    check_support(nn.Sequential(gnn.ChebConv(D, D, K=2), nn.BatchNorm1d(D)), num_chunks=1)
