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
from torch_geometric.utils import remove_self_loops

D = 4
NUM_TYPES = 3
NUM_EDGE_FEATURES = 3

Call = Callable[[Any, Tensor, Tensor, SimpleNamespace], Any]


@dataclass(frozen=True)
class ConvCase:
    """A layer and how it is called with a batch.

    Edges come in groups of four with one target if it `is_mesh`; if it `has_two` edge sets, the
    second is `batch.other_edge_index`.
    """

    name: str
    make: Callable[[], nn.Module]
    call: Call = lambda conv, x, edges, batch: conv(x, edges)
    is_mesh: bool = False
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


weighted, attributed, typed = reading("edge_weight"), reading("edge_attr"), reading("edge_type")
typed_attributed, signed = reading("edge_type", "edge_attr"), reading("other_edge_index")
placed, initial = reading(front=("pos",)), reading(front=("x",))
initial_weighted = reading("edge_weight", front=("x",))


def learned(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv(x, edges, batch.edge_score.sigmoid())


def on_both(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv(x, edges) + 0.5 * conv(x, batch.other_edge_index)


def on_both_weighted(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    other = conv(x, batch.other_edge_index, batch.other_edge_weight)
    return conv(x, edges, batch.edge_weight) + 0.5 * other


def on_both_flipped(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    other = conv(x, batch.other_edge_index.flip([0]), batch.other_edge_weight)
    return conv(x, edges.flip([0])) + 0.5 * other


def joined(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv(x, torch.cat([edges, batch.other_edge_index], dim=1))


TO, BACK, OVER = ("a", "to", "a"), ("a", "back", "a"), ("a", "over", "a")
BOTH = (["a"], [TO, BACK])


def related(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv({"a": x}, {TO: edges, BACK: batch.other_edge_index})["a"]


def alone(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return conv({"a": x}, {TO: edges})["a"]


def related_flipped(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    return related(conv, x, edges.flip([0]), batch)


def related_weighted(conv: Any, x: Tensor, edges: Tensor, batch: SimpleNamespace) -> Any:
    weights = {TO: batch.edge_weight, BACK: batch.other_edge_weight}
    edge_sets = {TO: edges, BACK: batch.other_edge_index}
    return conv({"a": x}, edge_sets, edge_weight_dict=weights)["a"]


def mlp(width: int = D, out: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, D), nn.Tanh(), nn.Linear(D, out))


def mesh_kernel() -> nn.Sequential:
    kernel = mlp()
    kernel.in_features = kernel.out_features = D
    return kernel


def upstream(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: make(*args, **kwargs, flow="target_to_source")


HISTOGRAM = torch.tensor([1, 3, 4, 3])
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
    ConvCase("AGNNConv", lambda: gnn.AGNNConv()),
    ConvCase("AGNNConv no loops", lambda: gnn.AGNNConv(add_self_loops=False)),
    ConvCase("ARMAConv", lambda: gnn.ARMAConv(D, D, num_stacks=2, num_layers=2)),
    ConvCase("ARMAConv weight", lambda: gnn.ARMAConv(D, D, shared_weights=True), weighted),
    ConvCase("AntiSymmetricConv", lambda: gnn.AntiSymmetricConv(D, num_iters=2)),
    ConvCase("APPNP", lambda: gnn.APPNP(3, 0.1)),
    ConvCase("APPNP weight", lambda: gnn.APPNP(2, 0.1), weighted),
    ConvCase("APPNP cached", lambda: gnn.APPNP(2, 0.1, cached=True)),
    ConvCase("CGConv", lambda: gnn.CGConv(D)),
    ConvCase("CGConv edge", lambda: gnn.CGConv(D, dim=3, aggr="mean"), attributed),
    ConvCase("ChebConv", lambda: gnn.ChebConv(D, D, K=3)),
    ConvCase("ChebConv rw", lambda: gnn.ChebConv(D, D, K=2, normalization="rw")),
    ConvCase("ChebConv plain", lambda: gnn.ChebConv(D, D, K=2, normalization=None)),
    ConvCase("ChebConv weight", lambda: gnn.ChebConv(D, D, K=3), weighted),
    ConvCase("ChebConv two sets", lambda: gnn.ChebConv(D, D, K=3), on_both_weighted, has_two=True),
    ConvCase("ClusterGCNConv", lambda: gnn.ClusterGCNConv(D, D, diag_lambda=0.3)),
    ConvCase("DNAConv", lambda: gnn.DNAConv(D, heads=2), lambda c, x, e, b: c(stacked(x), e)),
    ConvCase(
        "DNAConv weight",
        lambda: gnn.DNAConv(D, groups=2),
        lambda c, x, e, b: c(stacked(x), e, b.edge_weight),
    ),
    ConvCase("DirGNNConv", lambda: gnn.DirGNNConv(gnn.SAGEConv(D, D))),
    ConvCase("DirGNNConv GCN", lambda: gnn.DirGNNConv(gnn.GCNConv(D, D), alpha=0.3)),
    ConvCase("DirGNNConv GAT", lambda: gnn.DirGNNConv(gnn.GATConv(D, D), root_weight=False)),
    ConvCase(
        "DirGNNConv two sets", lambda: gnn.DirGNNConv(gnn.GCNConv(D, D)), on_both, has_two=True
    ),
    ConvCase("EGConv", lambda: gnn.EGConv(D, D, num_heads=2, num_bases=2)),
    ConvCase(
        "EGConv several",
        lambda: gnn.EGConv(D, D, ["sum", "max", "std", "symnorm"], num_heads=2, num_bases=2),
    ),
    ConvCase("EGConv sum", lambda: gnn.EGConv(D, D, ["sum"], num_heads=2, num_bases=2)),
    ConvCase("EdgeConv", lambda: gnn.EdgeConv(mlp(2 * D))),
    ConvCase("FAConv", lambda: gnn.FAConv(D, eps=0.2), initial),
    ConvCase("FAConv weight", lambda: gnn.FAConv(D, normalize=False), initial_weighted),
    ConvCase("FastRGCNConv", lambda: gnn.FastRGCNConv(D, D, NUM_TYPES, num_bases=2), typed),
    ConvCase("FeaStConv", lambda: gnn.FeaStConv(D, D, heads=2)),
    ConvCase("FiLMConv", lambda: gnn.FiLMConv(D, D)),
    ConvCase("FiLMConv relations", lambda: gnn.FiLMConv(D, D, num_relations=NUM_TYPES), typed),
    ConvCase("GATConv", lambda: gnn.GATConv(D, D, heads=2)),
    ConvCase("GATConv mean", lambda: gnn.GATConv(D, D, 2, concat=False, add_self_loops=False)),
    ConvCase("GATConv residual", lambda: gnn.GATConv(D, D, heads=2, residual=True)),
    ConvCase("GATConv edge", lambda: gnn.GATConv(D, D, heads=2, edge_dim=3), attributed),
    ConvCase("GATConv upstream", upstream(gnn.GATConv, D, D, heads=2)),
    ConvCase("GATConv two sets", lambda: gnn.GATConv(D, D, heads=2), on_both, has_two=True),
    ConvCase("GATConv two sets upstream", upstream(gnn.GATConv, D, D), on_both, has_two=True),
    ConvCase("GATConv joined sets", lambda: gnn.GATConv(D, D, heads=2), joined, has_two=True),
    ConvCase("GATv2Conv", lambda: gnn.GATv2Conv(D, D, heads=2)),
    ConvCase("GATv2Conv shared", lambda: gnn.GATv2Conv(D, D, share_weights=True)),
    ConvCase("GATv2Conv edge", lambda: gnn.GATv2Conv(D, D, edge_dim=3), attributed),
    ConvCase("GCNConv", lambda: gnn.GCNConv(D, D)),
    ConvCase("GCNConv cached", lambda: gnn.GCNConv(D, D, cached=True)),
    ConvCase("GCNConv improved", lambda: gnn.GCNConv(D, D, improved=True)),
    ConvCase("GCNConv no loops", lambda: gnn.GCNConv(D, D, add_self_loops=False)),
    ConvCase("GCNConv no norm", lambda: gnn.GCNConv(D, D, normalize=False), weighted),
    ConvCase("GCNConv weight", lambda: gnn.GCNConv(D, D, improved=True), weighted),
    ConvCase("GCNConv learned", lambda: gnn.GCNConv(D, D), learned),
    ConvCase("GCNConv mean", lambda: gnn.GCNConv(D, D, aggr="mean")),
    ConvCase("GCNConv upstream", upstream(gnn.GCNConv, D, D)),
    ConvCase("GCNConv upstream weight", upstream(gnn.GCNConv, D, D), weighted),
    ConvCase("GCNConv flipped", lambda: gnn.GCNConv(D, D), lambda c, x, e, b: c(x, e.flip([0]))),
    ConvCase(
        "GCNConv flipped weight",
        lambda: gnn.GCNConv(D, D),
        lambda c, x, e, b: c(x, torch.stack([e[1], e[0]]), edge_weight=b.edge_weight),
    ),
    ConvCase(
        "GCNConv flipped upstream",
        upstream(gnn.GCNConv, D, D),
        lambda c, x, e, b: c(x, e.flip([0]), b.edge_weight),
    ),
    ConvCase("GCNConv decomposed", lambda: gnn.GCNConv(D, D, decomposed_layers=2)),
    ConvCase("GCNConv two sets", lambda: gnn.GCNConv(D, D), on_both, has_two=True),
    ConvCase("GCNConv two sets weight", lambda: gnn.GCNConv(D, D), on_both_weighted, has_two=True),
    ConvCase("GCNConv two sets flipped", lambda: gnn.GCNConv(D, D), on_both_flipped, has_two=True),
    ConvCase(
        "GCNConv two sets upstream", upstream(gnn.GCNConv, D, D), on_both_weighted, has_two=True
    ),
    ConvCase(
        "GCNConv two sets learned",
        lambda: gnn.GCNConv(D, D),
        lambda c, x, e, b: learned(c, x, e, b) + c(x, b.other_edge_index),
        has_two=True,
    ),
    ConvCase("GCNConv joined sets", lambda: gnn.GCNConv(D, D), joined, has_two=True),
    ConvCase("GCN2Conv", lambda: gnn.GCN2Conv(D, 0.1, 0.5, 1), initial),
    ConvCase(
        "GCN2Conv cached",
        lambda: gnn.GCN2Conv(D, 0.1, 0.5, 2, shared_weights=False, cached=True),
        initial,
    ),
    ConvCase("GCN2Conv weight", lambda: gnn.GCN2Conv(D, 0.1), initial_weighted),
    ConvCase("GENConv", lambda: gnn.GENConv(D, D, norm="layer")),
    ConvCase("GENConv learned", lambda: gnn.GENConv(D, D, norm=None, learn_t=True, msg_norm=True)),
    ConvCase("GENConv power", lambda: gnn.GENConv(D, D, norm="layer", aggr="powermean")),
    ConvCase("GENConv edge", lambda: gnn.GENConv(D, D, norm="layer", edge_dim=3), attributed),
    ConvCase("GINConv", lambda: gnn.GINConv(mlp(), train_eps=True)),
    ConvCase("GINEConv", lambda: gnn.GINEConv(mlp(), edge_dim=3), attributed),
    ConvCase("GMMConv", lambda: gnn.GMMConv(D, D, dim=3, kernel_size=2), attributed),
    ConvCase(
        "GMMConv separate", lambda: gnn.GMMConv(D, D, 3, 2, separate_gaussians=True), attributed
    ),
    ConvCase("GatedGraphConv", lambda: gnn.GatedGraphConv(D, num_layers=3)),
    ConvCase("GatedGraphConv weight", lambda: gnn.GatedGraphConv(D, num_layers=2), weighted),
    ConvCase("GeneralConv", lambda: gnn.GeneralConv(D, D, attention=True, heads=2)),
    ConvCase("GeneralConv dot", lambda: gnn.GeneralConv(D, D, attention=True, skip_linear=True)),
    ConvCase("GeneralConv edge", lambda: gnn.GeneralConv(D, D, in_edge_channels=3), attributed),
    ConvCase("GraphConv", lambda: gnn.GraphConv(D, D)),
    ConvCase("GraphConv max", lambda: gnn.GraphConv(D, D, aggr="max")),
    ConvCase("GraphConv weight", lambda: gnn.GraphConv(D, D), weighted),
    ConvCase("GraphConv upstream", upstream(gnn.GraphConv, D, D), weighted),
    ConvCase("HANConv", lambda: gnn.HANConv(D, D, BOTH), related, has_two=True),
    ConvCase("HANConv heads", lambda: gnn.HANConv(D, D, BOTH, heads=2), related, has_two=True),
    ConvCase("HANConv one set", lambda: gnn.HANConv(D, D, (["a"], [TO]), heads=2), alone),
    ConvCase(
        "HANConv three sets",
        lambda: gnn.HANConv(D, 2 * D, (["a"], [TO, BACK, OVER]), heads=2, negative_slope=0.4),
        lambda c, x, e, b: c({"a": x}, {TO: e, BACK: b.other_edge_index, OVER: e})["a"],
        has_two=True,
    ),
    ConvCase(
        "HEATConv",
        lambda: gnn.HEATConv(D, D, NUM_TYPES, NUM_TYPES, 2, 3, 2, heads=2),
        lambda c, x, e, b: c(x, e, b.node_type, b.edge_type, b.edge_attr),
    ),
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
    ConvCase("HGTConv", lambda: gnn.HGTConv(D, D, BOTH), related, has_two=True),
    ConvCase("HGTConv heads", lambda: gnn.HGTConv(D, 2 * D, BOTH, heads=2), related, has_two=True),
    ConvCase("HGTConv one set", lambda: gnn.HGTConv(D, D, (["a"], [TO]), heads=2), alone),
    ConvCase(
        "HGTConv some sets",
        lambda: gnn.HGTConv(D, D, (["a"], [TO, OVER, BACK]), heads=2),
        related,
        has_two=True,
    ),
    ConvCase("LEConv", lambda: gnn.LEConv(D, D)),
    ConvCase("LEConv weight", lambda: gnn.LEConv(D, D), weighted),
    ConvCase("LGConv", lambda: gnn.LGConv()),
    ConvCase("LGConv weight", lambda: gnn.LGConv(), weighted),
    ConvCase("MFConv", lambda: gnn.MFConv(D, D)),
    ConvCase("MeshCNNConv", lambda: gnn.MeshCNNConv(D, D), is_mesh=True),
    ConvCase(
        "MeshCNNConv kernels",
        lambda: gnn.MeshCNNConv(D, D, nn.ModuleList(mesh_kernel() for _ in range(5))),
        is_mesh=True,
    ),
    ConvCase("MixHopConv", lambda: gnn.MixHopConv(D, D, powers=[0, 1, 2])),
    ConvCase("MixHopConv weight", lambda: gnn.MixHopConv(D, D), weighted),
    ConvCase("NNConv", lambda: gnn.NNConv(D, D, nn.Linear(3, D * D)), attributed),
    ConvCase("PDNConv", lambda: gnn.PDNConv(D, D, edge_dim=3, hidden_channels=D), attributed),
    ConvCase(
        "PDNConv no norm",
        lambda: gnn.PDNConv(D, D, edge_dim=3, hidden_channels=D, normalize=False),
        attributed,
    ),
    ConvCase(
        "PNAConv",
        lambda: gnn.PNAConv(
            D, D, ["mean", "max", "std"], ["identity", "amplification", "attenuation"], HISTOGRAM
        ),
    ),
    ConvCase(
        "PNAConv towers",
        lambda: gnn.PNAConv(
            D, D, ["mean", "min", "max", "std"], ["identity", "linear"], HISTOGRAM, towers=2
        ),
    ),
    ConvCase(
        "PNAConv edge",
        lambda: gnn.PNAConv(D, D, ["mean"], ["identity"], HISTOGRAM, edge_dim=3),
        attributed,
    ),
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
    ConvCase("PointTransformerConv", lambda: gnn.PointTransformerConv(D, D), placed),
    ConvCase("RGATConv", lambda: gnn.RGATConv(D, D, NUM_TYPES, heads=2), typed),
    ConvCase(
        "RGATConv edge",
        lambda: gnn.RGATConv(
            D, D, NUM_TYPES, num_bases=2, edge_dim=3, attention_mechanism="within-relation"
        ),
        typed_attributed,
    ),
    ConvCase("RGCNConv", lambda: gnn.RGCNConv(D, D, NUM_TYPES), typed),
    ConvCase("RGCNConv bases", lambda: gnn.RGCNConv(D, D, NUM_TYPES, num_bases=2), typed),
    ConvCase(
        "RGCNConv blocks", lambda: gnn.RGCNConv(D, D, NUM_TYPES, num_blocks=2, aggr="sum"), typed
    ),
    ConvCase("ResGatedGraphConv", lambda: gnn.ResGatedGraphConv(D, D)),
    ConvCase("ResGatedGraphConv edge", lambda: gnn.ResGatedGraphConv(D, D, edge_dim=3), attributed),
    ConvCase("SAGEConv", lambda: gnn.SAGEConv(D, D)),
    ConvCase("SAGEConv project", lambda: gnn.SAGEConv(D, D, aggr="max", project=True)),
    ConvCase(
        "SAGEConv several", lambda: gnn.SAGEConv(D, D, ["mean", "max", "std"], normalize=True)
    ),
    ConvCase("SAGEConv upstream", upstream(gnn.SAGEConv, D, D)),
    *(
        ConvCase(f"SAGEConv {name}", lambda make=make: gnn.SAGEConv(D, D, aggr=make()))
        for name, make in AGGREGATIONS.items()
    ),
    ConvCase("SGConv", lambda: gnn.SGConv(D, D, K=2)),
    ConvCase("SGConv weight", lambda: gnn.SGConv(D, D, K=2), weighted),
    ConvCase("SSGConv", lambda: gnn.SSGConv(D, D, alpha=0.1, K=2)),
    ConvCase("SAGEConv two sets", lambda: gnn.SAGEConv(D, D), on_both, has_two=True),
    ConvCase("SAGEConv two sets max", lambda: gnn.SAGEConv(D, D, "max"), on_both, has_two=True),
    ConvCase("SignedConv", lambda: gnn.SignedConv(D, D, True), signed, has_two=True),
    ConvCase("SignedConv deep", lambda: gnn.SignedConv(D // 2, D, False), signed, has_two=True),
    ConvCase(
        "SignedConv max", lambda: gnn.SignedConv(D, D, True, aggr="max"), signed, has_two=True
    ),
    ConvCase("SimpleConv", lambda: gnn.SimpleConv(aggr="mean", combine_root="sum")),
    ConvCase("SimpleConv set to set", lambda: gnn.SimpleConv(gnn.aggr.Set2Set(D, 2))),
    ConvCase("SimpleConv loop", lambda: gnn.SimpleConv("sum", "self_loop"), weighted),
    # Its spline functions are those of `splines`: pyg-lib is not on the package index.
    ConvCase("SplineConv", lambda: gnn.SplineConv(D, D, dim=3, kernel_size=2), attributed),
    ConvCase(
        "SplineConv closed",
        lambda: gnn.SplineConv(D, D, 3, [3, 2, 4], is_open_spline=[False, True, False], aggr="add"),
        attributed,
    ),
    ConvCase(
        "SplineConv no root",
        lambda: gnn.SplineConv(D, D, 3, 3, aggr="max", root_weight=False, bias=False),
        attributed,
    ),
    ConvCase("SuperGATConv", lambda: gnn.SuperGATConv(D, D, heads=2)),
    ConvCase(
        "SuperGATConv scaled",
        lambda: gnn.SuperGATConv(D, D, 2, concat=False, attention_type="SD", add_self_loops=False),
    ),
    ConvCase("SuperGATConv pairs", lambda: gnn.SuperGATConv(D, D), signed, has_two=True),
    ConvCase("SuperGATConv upstream", upstream(gnn.SuperGATConv, D, D)),
    ConvCase("TAGConv", lambda: gnn.TAGConv(D, D, K=2)),
    ConvCase("TAGConv weight", lambda: gnn.TAGConv(D, D, K=2), weighted),
    ConvCase("TransformerConv", lambda: gnn.TransformerConv(D, D, heads=2, beta=True)),
    ConvCase("TransformerConv edge", lambda: gnn.TransformerConv(D, D, 2, edge_dim=3), attributed),
    ConvCase("WLConvContinuous", lambda: gnn.WLConvContinuous()),
    ConvCase("WLConvContinuous weight", lambda: gnn.WLConvContinuous(), weighted),
]


BY_SELF_CHECK: list[ConvCase] = [
    # Several edge sets, one of them turned round, or all read upstream.
    ConvCase("HANConv flipped", lambda: gnn.HANConv(D, D, BOTH), related_flipped, has_two=True),
    ConvCase("HGTConv flipped", lambda: gnn.HGTConv(D, D, BOTH), related_flipped, has_two=True),
    ConvCase("HANConv upstream", upstream(gnn.HANConv, D, D, BOTH), related, has_two=True),
    ConvCase("HGTConv upstream", upstream(gnn.HGTConv, D, D, (["a"], [TO])), alone),
    # Two edge sets at once, read upstream.
    ConvCase("SignedConv upstream", upstream(gnn.SignedConv, D, D, True), signed, has_two=True),
    # They look at row 1 of the edges for the receivers, whatever their flow is.
    ConvCase("ChebConv upstream", upstream(gnn.ChebConv, D, D, K=2), weighted),
    ConvCase("GATConv upstream edge", upstream(gnn.GATConv, D, D, edge_dim=3), attributed),
    # A Laplacian of weights that are learned, edge features that are computed, on reversed edges.
    ConvCase("ChebConv learned", lambda: gnn.ChebConv(D, D, K=2), learned),
    ConvCase("GCNConv upstream learned", upstream(gnn.GCNConv, D, D), learned),
    ConvCase(
        "GCNConv upstream changed",
        upstream(gnn.GCNConv, D, D),
        lambda c, x, e, b: c(x, remove_self_loops(e)[0]),
    ),
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
        batch = SimpleNamespace(
            x=x,
            edge_weight=edge_weight,
            edge_attr=edge_attr,
            edge_type=edge_type,
            node_type=node_type,
            pos=pos,
            normal=normal,
            other_edge_index=other_edge_index,
            other_edge_weight=other_edge_weight,
        )
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
    "HypergraphConv": lambda: gnn.HypergraphConv(D, D),
    "MessagePassing": None,
    "PANConv": lambda: gnn.PANConv(D, D, filter_size=2),
    "WLConv": lambda: gnn.WLConv(),
    "XConv": None,
}
"""Layers that are not exact on chunks; None for those that a plain installation cannot build."""
