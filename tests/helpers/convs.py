"""Every layer that PyG exports with representative options, or why it cannot be pipelined.

`CASES` build layers that must be exact on chunks; `REFUSED` name the others. Together they are all
of `torch_geometric.nn.conv`: a test counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.nn.conv import spline_conv

from tests.helpers.splines import spline_basis, spline_weighting

# Functions of a library that pip does not bring.
spline_conv.spline_basis, spline_conv.spline_weighting = spline_basis, spline_weighting

D = 4
NUM_TYPES = 3
NUM_EDGE_FEATURES = 3

Call = Callable[[Any, Tensor, Tensor, SimpleNamespace], Any]


@dataclass(frozen=True)
class ConvCase:
    """A layer and how it is called; if it `has_two` edge sets, the second is `other_edge_index`."""

    name: str
    make: Callable[[], nn.Module]
    call: Call = lambda conv, x, edges, batch: conv(x, edges)
    has_two: bool = False

    @property
    def conv(self) -> str:
        """The name of the class."""
        return self.name.partition(" ")[0]


def reading(*names: str, front: tuple[str, ...] = ()) -> Call:
    """Return a call with these tensors of the batch behind the edges, and in front of them."""

    def call(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
        before, behind = ([getattr(batch, name) for name in each] for each in (front, names))
        return conv(x, *before, edges, *behind)

    return call


of_types = reading("node_type", "edge_type", "edge_attr")
weighted, attributed, typed = reading("edge_weight"), reading("edge_attr"), reading("edge_type")
typed_attributed, signed = reading("edge_type", "edge_attr"), reading("other_edge_index")
placed, initial = reading(front=("pos",)), reading(front=("x",))
initial_weighted = reading("edge_weight", front=("x",))


def learned(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv(x, edges, batch.edge_score.sigmoid())


def flipped(edges: Tensor) -> Tensor:
    return edges.flip([0])


def on(change: Callable[[Tensor], Tensor], call: Call = ConvCase.call) -> Call:
    """Return `call` on edges that are changed."""
    return lambda conv, x, edges, batch: call(conv, x, change(edges), batch)


def learned_and_other(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return learned(conv, x, edges, batch) + conv(x, batch.other_edge_index)


def on_both(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv(x, edges) + 0.5 * conv(x, batch.other_edge_index)


def on_both_weighted(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    other = conv(x, batch.other_edge_index, batch.other_edge_weight)
    return conv(x, edges, batch.edge_weight) + 0.5 * other


def on_both_flipped(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv(x, edges.flip([0])) + 0.5 * conv(x, batch.other_edge_index.flip(dims=[0]))


def joined(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv(x, torch.cat([edges, batch.other_edge_index], dim=1))


TO, BACK = ("a", "to", "a"), ("a", "back", "a")


def related(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv({"a": x}, {TO: edges, BACK: batch.other_edge_index})["a"]


def related_weighted(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    weights = {TO: batch.edge_weight, BACK: batch.other_edge_weight}
    edge_sets = {TO: edges, BACK: batch.other_edge_index}
    return conv({"a": x}, edge_sets, edge_weight_dict=weights)["a"]


def mlp(width: int = D, out: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, D), nn.Tanh(), nn.Linear(D, out))


UPSTREAM = "target_to_source"


def of(
    name: str,
    *args: Any,
    call: Call = ConvCase.call,
    has_two: bool = False,
    **options: Any,
) -> ConvCase:
    """Return the case of the class that `name` begins with."""
    kind = getattr(gnn, name.partition(" ")[0])
    return ConvCase(name, lambda: kind(*args, **options), call, has_two)


HISTOGRAM = torch.tensor([1, 3, 4, 3])
SCALERS = ["identity", "amplification", "attenuation"]
AGGREGATIONS: dict[str, Callable[[], Any]] = {
    "attentional": lambda: gnn.AttentionalAggregation(mlp(D, 1)),
    "deep sets": lambda: gnn.DeepSetsAggregation(mlp(), mlp()),
    "max": lambda: gnn.MaxAggregation(),
    "median": lambda: gnn.MedianAggregation(),
    "min": lambda: gnn.MinAggregation(),
    "mul": lambda: gnn.MulAggregation(),
    "power mean": lambda: gnn.PowerMeanAggregation(learn=True),
    "quantile": lambda: gnn.QuantileAggregation(0.4),
    "softmax": lambda: gnn.SoftmaxAggregation(learn=True),
    "std": lambda: gnn.StdAggregation(),
    "sum": lambda: gnn.SumAggregation(),
    "var": lambda: gnn.VarAggregation(),
    "variance preserving": lambda: gnn.VariancePreservingAggregation(),
}

CASES: list[ConvCase] = [
    of("AGNNConv"),
    of("ARMAConv", D, D, num_stacks=2, num_layers=2),
    of("AntiSymmetricConv", D, num_iters=2),
    of("APPNP", 3, 0.1),
    of("APPNP weight", 2, 0.1, call=weighted),
    of("APPNP cached", 2, 0.1, cached=True),
    of("CGConv", D),
    of("CGConv edge", D, dim=3, aggr="mean", call=attributed),
    of("ChebConv", D, D, K=3),
    of("ChebConv weight", D, D, K=3, call=weighted),
    of("ChebConv two sets", D, D, K=3, call=on_both_weighted, has_two=True),
    of("ClusterGCNConv", D, D, diag_lambda=0.3),
    of("DNAConv", D, heads=2, call=lambda c, x, e, b: c(stacked(x), e)),
    of("DNAConv weight", D, groups=2, call=lambda c, x, e, b: c(stacked(x), e, b.edge_weight)),
    ConvCase("DirGNNConv", lambda: gnn.DirGNNConv(gnn.SAGEConv(D, D))),
    ConvCase("DirGNNConv GCN", lambda: gnn.DirGNNConv(gnn.GCNConv(D, D), alpha=0.3)),
    ConvCase(
        "DirGNNConv two sets", lambda: gnn.DirGNNConv(gnn.GCNConv(D, D)), on_both, has_two=True
    ),
    of("EGConv", D, D, num_heads=2, num_bases=2),
    of("EGConv several", D, D, ["sum", "max", "std", "symnorm"], num_heads=2, num_bases=2),
    ConvCase("EdgeConv", lambda: gnn.EdgeConv(mlp(2 * D))),
    of("FAConv", D, eps=0.2, call=initial),
    of("FAConv weight", D, normalize=False, call=initial_weighted),
    of("FastRGCNConv", D, D, NUM_TYPES, num_bases=2, call=typed),
    of("FeaStConv", D, D, heads=2),
    of("FiLMConv", D, D),
    of("FiLMConv relations", D, D, num_relations=NUM_TYPES, call=typed),
    of("GATConv", D, D, heads=2),
    of("GATConv edge", D, D, heads=2, edge_dim=3, call=attributed),
    of("GATConv upstream", D, D, heads=2, flow=UPSTREAM),
    of("GATConv two sets", D, D, heads=2, call=on_both, has_two=True),
    of("GATConv joined sets", D, D, heads=2, call=joined, has_two=True),
    of("GATv2Conv", D, D, heads=2),
    of("GATv2Conv edge", D, D, edge_dim=3, call=attributed),
    of("GCNConv", D, D),
    of("GCNConv cached", D, D, cached=True),
    of("GCNConv no loops", D, D, add_self_loops=False),
    of("GCNConv no norm", D, D, normalize=False, call=weighted),
    of("GCNConv weight", D, D, improved=True, call=weighted),
    of("GCNConv learned", D, D, call=learned),
    of("GCNConv upstream", D, D, flow=UPSTREAM),
    of("GCNConv flipped", D, D, call=on(flipped)),
    of("GCNConv two sets", D, D, call=on_both, has_two=True),
    of("GCNConv two sets weight", D, D, call=on_both_weighted, has_two=True),
    of("GCNConv two sets flipped", D, D, call=on_both_flipped, has_two=True),
    of("GCNConv two sets upstream", D, D, flow=UPSTREAM, call=on_both, has_two=True),
    of("GCNConv two sets learned", D, D, call=learned_and_other, has_two=True),
    of("GCNConv joined sets", D, D, call=joined, has_two=True),
    of("GCN2Conv", D, 0.1, 0.5, 1, call=initial),
    of("GCN2Conv cached", D, 0.1, 0.5, 2, shared_weights=False, cached=True, call=initial),
    of("GCN2Conv weight", D, 0.1, call=initial_weighted),
    of("GENConv", D, D, norm="layer"),
    of("GENConv edge", D, D, norm="layer", edge_dim=3, call=attributed),
    ConvCase("GINConv", lambda: gnn.GINConv(mlp(), train_eps=True)),
    ConvCase("GINEConv", lambda: gnn.GINEConv(mlp(), edge_dim=3), attributed),
    of("GMMConv", D, D, dim=3, kernel_size=2, call=attributed),
    of("GatedGraphConv", D, num_layers=3),
    of("GeneralConv", D, D, attention=True, heads=2),
    of("GeneralConv edge", D, D, in_edge_channels=3, call=attributed),
    of("GraphConv", D, D),
    of("GraphConv max", D, D, aggr="max"),
    of("GraphConv weight", D, D, call=weighted),
    of("GraphConv upstream", D, D, flow=UPSTREAM),
    of("HEATConv", D, D, NUM_TYPES, NUM_TYPES, 2, 3, 2, heads=2, call=of_types),
    ConvCase(
        "HeteroConv",
        lambda: gnn.HeteroConv({TO: gnn.SAGEConv(D, D), BACK: gnn.GATConv(D, D)}, aggr="mean"),
        related,
        has_two=True,
    ),
    ConvCase(
        "HeteroConv weight",
        lambda: gnn.HeteroConv({TO: gnn.GCNConv(D, D), BACK: gnn.GraphConv(D, D)}, aggr="cat"),
        related_weighted,
        has_two=True,
    ),
    of("LEConv", D, D),
    of("LGConv"),
    of("LGConv weight", call=weighted),
    of("MFConv", D, D),
    of("MixHopConv", D, D, powers=[0, 1, 2]),
    of("MixHopConv weight", D, D, call=weighted),
    ConvCase("NNConv", lambda: gnn.NNConv(D, D, nn.Linear(3, D * D)), attributed),
    of("PDNConv", D, D, edge_dim=3, hidden_channels=D, call=attributed),
    of("PNAConv", D, D, ["mean", "max", "std"], SCALERS, HISTOGRAM),
    of("PNAConv edge", D, D, ["mean"], ["identity"], HISTOGRAM, edge_dim=3, call=attributed),
    ConvCase(
        "PPFConv",
        lambda: gnn.PPFConv(mlp(D + 4)),
        lambda c, x, e, b: c(x, b.pos, b.normal, e),
    ),
    ConvCase("PointGNNConv", lambda: gnn.PointGNNConv(mlp(D, 3), mlp(D + 3), mlp()), placed),
    ConvCase("PointNetConv", lambda: gnn.PointNetConv(mlp(D + 3), mlp()), placed),
    ConvCase(
        "PointNetConv no features",
        lambda: gnn.PointNetConv(mlp(3)),
        lambda c, x, e, b: c(None, x[:, :3], e),
    ),
    of("PointTransformerConv", D, D, call=placed),
    of("RGATConv", D, D, NUM_TYPES, heads=2, call=typed),
    of(
        "RGATConv edge",
        D,
        D,
        NUM_TYPES,
        num_bases=2,
        edge_dim=3,
        attention_mechanism="within-relation",
        call=typed_attributed,
    ),
    of("RGCNConv", D, D, NUM_TYPES, call=typed),
    of("ResGatedGraphConv", D, D),
    of("ResGatedGraphConv edge", D, D, edge_dim=3, call=attributed),
    of("SAGEConv", D, D),
    of("SAGEConv several", D, D, ["mean", "max", "std"], normalize=True),
    of("SAGEConv upstream", D, D, flow=UPSTREAM),
    *(
        ConvCase(f"SAGEConv {name}", lambda make=make: gnn.SAGEConv(D, D, aggr=make()))
        for name, make in AGGREGATIONS.items()
    ),
    of("SGConv", D, D, K=2),
    of("SGConv weight", D, D, K=2, call=weighted),
    of("SSGConv", D, D, alpha=0.1, K=2),
    of("SAGEConv two sets", D, D, call=on_both, has_two=True),
    of("SAGEConv two sets max", D, D, "max", call=on_both, has_two=True),
    of("SignedConv", D, D, True, call=signed, has_two=True),
    of("SignedConv max", D, D, True, aggr="max", call=signed, has_two=True),
    of("SimpleConv", aggr="mean", combine_root="sum"),
    ConvCase("SimpleConv set to set", lambda: gnn.SimpleConv(gnn.aggr.Set2Set(D, 2))),
    of("SimpleConv loop", "sum", "self_loop", call=weighted),
    # Its spline functions are those of `splines`: pyg-lib is not on the package index.
    of("SplineConv", D, D, dim=3, kernel_size=2, call=attributed),
    ConvCase(
        "SplineConv closed",
        lambda: gnn.SplineConv(D, D, 3, [3, 2, 4], is_open_spline=[False, True, False], aggr="add"),
        attributed,
    ),
    of(
        "SplineConv no root", D, D, 3, 3, aggr="max", root_weight=False, bias=False, call=attributed
    ),
    of("TAGConv", D, D, K=2),
    of("TAGConv weight", D, D, K=2, call=weighted),
    of("TransformerConv", D, D, heads=2, beta=True),
    of("TransformerConv edge", D, D, 2, edge_dim=3, call=attributed),
    of("WLConvContinuous"),
    of("WLConvContinuous weight", call=weighted),
]


BY_SELF_CHECK: list[ConvCase] = [
    # Several edge sets, all read upstream.
    # Two edge sets at once, read upstream.
    of("SignedConv upstream", D, D, True, flow=UPSTREAM, call=signed, has_two=True),
    # They look at row 1 of the edges for the receivers, whatever their flow is.
    of("ChebConv upstream", D, D, K=2, flow=UPSTREAM, call=weighted),
    of("ChebConv upstream plain", D, D, K=2, flow=UPSTREAM),
    of("GATConv upstream edge", D, D, edge_dim=3, flow=UPSTREAM, call=attributed),
    # A Laplacian of weights that are learned.
    of("ChebConv learned", D, D, K=2, call=learned),
    # Features of edges on turned edges.
    of("GCNConv upstream learned", D, D, flow=UPSTREAM, call=learned),
    of("GCNConv upstream weight", D, D, flow=UPSTREAM, call=weighted),
    of("GCNConv flipped weight", D, D, call=on(flipped, weighted)),
]
"""Uses of layers that are exact otherwise, which the self-check or the layer itself refuses."""


def stacked(x: Tensor) -> Tensor:
    """Return `[num_nodes, 2, channels]`: x and its half, as if from two layers."""
    return torch.stack([x, x * 0.5], dim=1)


class ConvNet(nn.Module):
    """Two layers of one kind with a linear map behind each, and everything that a layer may need.

    Args:
        case: The layers.
        batch: Node- and edge-level tensors by name, to try the first layer on.
    """

    def __init__(self, case: ConvCase, batch: dict[str, Tensor]) -> None:
        super().__init__()
        self.call = case.call
        self.first, self.second = case.make(), case.make()
        named = SimpleNamespace(**{key: batch[key] for key in batch if key != "edge_index"})
        named.edge_score = torch.zeros(batch["edge_index"].size(1))
        with torch.no_grad():
            out = case.call(self.first, batch["x"], batch["edge_index"], named)
        self.score = nn.Linear(NUM_EDGE_FEATURES, 1)
        self.between, self.last = nn.Linear(out.size(-1), D), nn.Linear(out.size(-1), D)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor,
        edge_attr: Tensor,
        edge_type: Tensor,
        node_type: Tensor,
        pos: Tensor,
        normal: Tensor,
        other_edge_index: Tensor | None = None,
        other_edge_weight: Tensor | None = None,
    ) -> Tensor:
        batch = SimpleNamespace(**locals())
        batch.edge_score = self.score(edge_attr).squeeze(-1)
        x = torch.tanh(self.between(self.call(self.first, x, edge_index, batch)))
        return self.last(self.call(self.second, x, edge_index, batch))


REFUSED: dict[str, Callable[[], nn.Module] | None] = {
    "CuGraphGATConv": None,
    "CuGraphRGCNConv": None,
    "CuGraphSAGEConv": None,
    "DynamicEdgeConv": None,
    "FusedGATConv": None,
    "GPSConv": lambda: gnn.GPSConv(D, gnn.GCNConv(D, D)),
    "GravNetConv": None,
    "HANConv": lambda: gnn.HANConv(D, D, (["a"], [TO])),
    "HGTConv": lambda: gnn.HGTConv(D, D, (["a"], [TO])),
    "HypergraphConv": lambda: gnn.HypergraphConv(D, D),
    "MeshCNNConv": lambda: gnn.MeshCNNConv(D, D),
    "MessagePassing": None,
    "PANConv": lambda: gnn.PANConv(D, D, filter_size=2),
    "SuperGATConv": lambda: gnn.SuperGATConv(D, D),
    "WLConv": lambda: gnn.WLConv(),
    "XConv": None,
}
"""Layers that are not exact on chunks; None for those that a plain installation cannot build."""
