"""Which PyG layers are exact on several chunks, and checks that refuse the rest.

Layers of the user are tried on a small graph before training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.nn.aggr.fused import FusedAggregation

from lightning_gnnpipe._compat_torch import BATCH_NORM, INSTANCE_NORM, has_spectral_norm
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.layers.statistics import has_statistics

# Tests verify these.
_EXACT = """
AGNNConv APPNP ARMAConv CGConv ChebConv ClusterGCNConv DNAConv EGConv EdgeConv FAConv FastRGCNConv
FeaStConv FiLMConv GATConv GATv2Conv GCN2Conv GCNConv GENConv GINConv GINEConv GMMConv
GatedGraphConv GeneralConv GraphConv HEATConv LEConv LGConv MFConv MixHopConv NNConv PDNConv PNAConv
PPFConv PointGNNConv PointNetConv PointTransformerConv RGATConv RGCNConv ResGatedGraphConv SAGEConv
SGConv SSGConv SignedConv SimpleConv SplineConv TAGConv TransformerConv WLConvContinuous
"""
EXACT_CONVS: frozenset[type] = frozenset(getattr(gnn, name) for name in _EXACT.split())

# Aggregations whose result for a node depends on its own messages only. LSTM and similar ones pad
# to the largest neighbourhood of the graph.
_OF_MESSAGES = """
Attentional DeepSets DegreeScaler Max Mean Median Min Mul Multi PowerMean Quantile Softmax Std Sum
Var VariancePreserving
"""
_NAMED = (getattr(aggr, f"{name}Aggregation") for name in _OF_MESSAGES.split())
EXACT_AGGREGATIONS: frozenset[type] = frozenset((FusedAggregation, aggr.Set2Set, *_NAMED))

_KNN = "it needs pyg-lib and looks for the nearest among all nodes"
_TYPES = "it joins nodes of several types"
_CUGRAPH = "it needs pylibcugraphops, and its kernels read the whole graph"

# Layers of `torch_geometric.nn.conv` that are not exact on chunks, and why.
REFUSED_CONVS: dict[type, str] = {
    gnn.CuGraphGATConv: _CUGRAPH,
    gnn.CuGraphRGCNConv: _CUGRAPH,
    gnn.CuGraphSAGEConv: _CUGRAPH,
    gnn.DynamicEdgeConv: _KNN,
    gnn.FusedGATConv: "it needs dgNN, and its kernels read the whole graph",
    gnn.GPSConv: "its attention runs over all nodes",
    gnn.GravNetConv: _KNN,
    gnn.HANConv: _TYPES,
    gnn.HGTConv: _TYPES,
    gnn.HypergraphConv: "it passes messages between nodes and hyperedges, which belong to no chunk",
    gnn.PANConv: "it needs torch_sparse and multiplies powers of the whole adjacency",
    gnn.SuperGATConv: "its loss draws pairs of all nodes, outside of its forward",
    gnn.WLConv: "it numbers the colors of all nodes",
    gnn.XConv: _KNN,
}

# Layers that keep or join nodes, chosen among all.
_CHOOSING = (gnn.TopKPooling, gnn.SAGPooling, gnn.ASAPooling, gnn.EdgePooling, gnn.PANPooling)

# Modules that compute over all rows at once, and the reason that errors show.
_ROW_MIXING: tuple[tuple[type, str], ...] = (
    (BATCH_NORM, "its statistics are taken over all nodes"),
    (INSTANCE_NORM, "its statistics are taken over all nodes"),
    (gnn.HeteroBatchNorm, "its statistics are taken over all nodes of a type"),
)

_REMEDY_RELATIONS = (
    "Pass several edge sets over the same nodes as several 'edge_index' (SignedConv, HeteroConv "
    "with one type of nodes), or as edge types (RGCNConv, RGATConv)."
)
_REMEDY_CONV = (
    "Train with num_chunks=1, or use a layer that docs/support.md lists, such as SAGEConv, or a "
    "MessagePassing subclass of your own."
)
_REMEDY_AGGREGATION = (
    'Train with num_chunks=1, or use aggr="mean", "sum", "max", "std", "softmax" or "powermean".'
)
_REMEDY_NORM = (
    "Use torch.nn.BatchNorm1d, another norm of torch_geometric.nn, or one that works row by row "
    "(torch.nn.LayerNorm), or train with num_chunks=1."
)
_REMEDY_CHOOSING = "Train networks that pool between layers without the strategy."
_REMEDY_HETERO = "Use a norm with a batch vector (torch_geometric.nn.GraphNorm), or num_chunks=1."
_REMEDY_SPECTRAL = "Remove the spectral norm, or train with num_chunks=1."

# Why a layer is refused, and what to do instead.
Refusals = Iterator[tuple[str, str]]


def check_support(module: nn.Module, num_chunks: int, num_shards: int = 1) -> None:
    """Refuse lazy layers, and those not known to be exact on `num_chunks` chunks in each shard."""
    _refuse_lazy(module)
    num_parts = num_chunks * num_shards
    alone = "num_chunks=1 and graph_parallel=1" if num_shards > 1 else "num_chunks=1"
    _refuse_layers(module, lambda name, layer: _refused(module, name, layer, num_parts), alone)


def check_norms(module: nn.Module, without_batch: Collection[str]) -> None:
    """Refuse norms, other than BatchNorm, whose result micro-batches of graphs would change.

    `without_batch`: names of norms that are called without a batch vector.
    """
    _refuse_layers(module, lambda name, layer: _refused_in_parts(layer, name in without_batch))


def check_replicas(num_replicas: int) -> None:
    """Raise `UnsupportedError` for several replicas: on one graph all would train alike."""
    if num_replicas > 1:
        raise UnsupportedError(
            expected="batches of graphs for data_parallel",
            found=f"one graph, on which all {num_replicas} replicas would compute the same",
            remedy="Use data_parallel=1, and use the devices for more stages or shards.",
        )


def check_graph_batches(num_shards: int) -> None:
    """Refuse to split batches of graphs over shards."""
    if num_shards > 1:
        raise UnsupportedError(
            expected="a single large graph for graph_parallel > 1",
            found="a batch of several graphs",
            remedy="Use graph_parallel=1: the graphs of a batch are assigned to micro-batches "
            "instead.",
        )


def _refuse_lazy(module: nn.Module) -> None:
    lazy = [
        f"'{name}'"
        for name, layer in module.named_modules()
        if any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters(recurse=False))
    ]
    if lazy:
        raise UnsupportedError(
            expected="all weights to have their shapes before training",
            found=f"lazy layers, {', '.join(lazy)}",
            remedy="Write the number of input channels, as in SAGEConv(64, 32) for "
            "SAGEConv(-1, 32), or call the network once before Trainer.fit.",
        )


def _refuse_layers(
    module: nn.Module, refused: Callable[[str, nn.Module], Refusals], alone: str = "num_chunks=1"
) -> None:
    """Raise for all layers that are `refused`; with the options `alone` they would be exact."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, layer in module.named_modules():
        for why in refused(name, layer):
            found.setdefault((type(layer).__name__, *why), []).append(f"'{name}'")
    problems = [
        explain(
            expected="every layer to be exact on chunks of the graph",
            found=f"{', '.join(names)}, a {kind}: {reason}".replace("''", "the module itself"),
            remedy=remedy.replace("num_chunks=1", alone),
        )
        for (kind, reason, remedy), names in found.items()
    ]
    if problems:
        raise UnsupportedError("\n".join(problems))


def _refused_in_parts(layer: nn.Module, is_without_batch: bool) -> Refusals:
    if layer.training and isinstance(layer, gnn.HeteroBatchNorm):
        yield "its statistics are taken over all graphs", _REMEDY_HETERO
    elif layer.training and isinstance(layer, gnn.InstanceNorm) and layer.track_running_stats:
        remedy = "Use track_running_stats=False, or num_chunks=1."
        yield "its running statistics would be updated once per micro-batch", remedy
    elif layer.training and has_spectral_norm(layer):
        reason = "the power iteration of its spectral norm would run once per micro-batch"
        yield reason, _REMEDY_SPECTRAL
    elif isinstance(layer, BATCH_NORM):
        if layer.training and type(layer).forward is not BATCH_NORM.forward:
            remedy = "Call torch.nn.BatchNorm1d, then the rest, or train with num_chunks=1."
            yield "its forward is not that of torch.nn.BatchNorm1d", remedy
    elif isinstance(layer, gnn.BatchNorm):
        return
    elif is_without_batch and has_statistics(layer):
        remedy = "Call it as norm(x, batch), or train with num_chunks=1."
        yield "it is called without a batch vector, so over all graphs", remedy


def _refused(module: nn.Module, name: str, layer: nn.Module, num_parts: int) -> Refusals:
    if isinstance(layer, torch.jit.ScriptModule) and hasattr(layer, "aggr_module"):
        remedy = "Use the layer as it was before torch.jit.script or torch.jit.trace."
        yield "torch.jit has compiled its message passing", remedy
    elif isinstance(layer, gnn.SuperGATConv):
        yield REFUSED_CONVS[gnn.SuperGATConv], "Use GATConv, or train without GNNPipeStrategy."
    elif num_parts > 1:
        yield from _refused_on_chunks(module, name, layer)
        if has_spectral_norm(layer):
            reason = "the power iteration of its spectral norm would run once per chunk"
            yield reason, _REMEDY_SPECTRAL


def _refused_on_chunks(module: nn.Module, name: str, layer: nn.Module) -> Refusals:
    mixing = next((why for kind, why in _ROW_MIXING if isinstance(layer, kind)), None)
    if isinstance(layer, gnn.HeteroConv):
        if len({end for relation in layer.convs.keys() for end in relation[::2]}) > 1:  # noqa: SIM118
            yield _TYPES, _REMEDY_RELATIONS
        elif layer.aggr in ("min", "max"):
            yield f"its aggr='{layer.aggr}' cannot be traced", 'Use aggr="sum", "mean" or "cat".'
    elif has_statistics(layer):
        return
    elif mixing is not None:
        yield mixing, _REMEDY_NORM
    elif isinstance(layer, _CHOOSING):
        yield "it chooses the nodes of later layers among all", _REMEDY_CHOOSING
    elif isinstance(layer, (MessagePassing, *REFUSED_CONVS)):
        yield from _refused_conv(layer)
    elif not isinstance(layer, aggr.Aggregation) or not _is_inside_conv(module, name):
        return  # a pool: refused in `cut_layers` if it is between layers
    elif type(layer) not in EXACT_AGGREGATIONS:
        yield "it is not known to be exact on chunks", _REMEDY_AGGREGATION


def _refused_conv(conv: nn.Module) -> Refusals:
    reason = next((why for kind, why in REFUSED_CONVS.items() if isinstance(conv, kind)), None)
    is_of_pyg = type(conv).__module__.startswith("torch_geometric.")
    if reason is not None or (is_of_pyg and type(conv) not in EXACT_CONVS):
        joining = gnn.HypergraphConv | gnn.HANConv | gnn.HGTConv
        remedy = _REMEDY_RELATIONS if isinstance(conv, joining) else _REMEDY_CONV
        yield reason or "it is not known to be exact on chunks", remedy


def _is_inside_conv(module: nn.Module, name: str) -> bool:
    parts = name.split(".")
    parents = (module.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return any(isinstance(parent, MessagePassing) for parent in parents)
