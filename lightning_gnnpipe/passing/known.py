"""Which of PyG's layers are exact on chunks, and why the others are not."""

from __future__ import annotations

import torch_geometric.nn as gnn
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr.fused import FusedAggregation

from lightning_gnnpipe._compat_pyg import MESH_CNN_CONV

EXACT_CONVS: frozenset[type] = frozenset(
    {
        gnn.AGNNConv,
        gnn.APPNP,
        gnn.ARMAConv,
        gnn.CGConv,
        gnn.ChebConv,
        gnn.ClusterGCNConv,
        gnn.DNAConv,
        gnn.EGConv,
        gnn.EdgeConv,
        gnn.FAConv,
        gnn.FastRGCNConv,
        gnn.FeaStConv,
        gnn.FiLMConv,
        gnn.GATConv,
        gnn.GATv2Conv,
        gnn.GCN2Conv,
        gnn.GCNConv,
        gnn.GENConv,
        gnn.GINConv,
        gnn.GINEConv,
        gnn.GMMConv,
        gnn.GatedGraphConv,
        gnn.GeneralConv,
        gnn.GraphConv,
        gnn.HANConv,
        gnn.HEATConv,
        gnn.HGTConv,
        gnn.LEConv,
        gnn.LGConv,
        gnn.MFConv,
        *MESH_CNN_CONV,
        gnn.MixHopConv,
        gnn.NNConv,
        gnn.PDNConv,
        gnn.PNAConv,
        gnn.PPFConv,
        gnn.PointGNNConv,
        gnn.PointNetConv,
        gnn.PointTransformerConv,
        gnn.RGATConv,
        gnn.RGCNConv,
        gnn.ResGatedGraphConv,
        gnn.SAGEConv,
        gnn.SGConv,
        gnn.SSGConv,
        gnn.SignedConv,
        gnn.SimpleConv,
        gnn.SplineConv,
        gnn.SuperGATConv,
        gnn.TAGConv,
        gnn.TransformerConv,
        gnn.WLConvContinuous,
    }
)

# Aggregations whose result for a node depends on its own messages alone. Not so LSTM and others
# that pad to the largest neighbourhood of the graph.
EXACT_AGGREGATIONS: frozenset[type] = frozenset(
    {
        aggr.AttentionalAggregation,
        aggr.DeepSetsAggregation,
        aggr.DegreeScalerAggregation,
        FusedAggregation,
        aggr.MaxAggregation,
        aggr.MeanAggregation,
        aggr.MedianAggregation,
        aggr.MinAggregation,
        aggr.MulAggregation,
        aggr.MultiAggregation,
        aggr.PowerMeanAggregation,
        aggr.QuantileAggregation,
        aggr.Set2Set,
        aggr.SoftmaxAggregation,
        aggr.StdAggregation,
        aggr.SumAggregation,
        aggr.VarAggregation,
        aggr.VariancePreservingAggregation,
    }
)

_KNN = "it needs pyg-lib and looks for the nearest among all nodes"
_CUGRAPH = "it needs pylibcugraphops, and its kernels read the whole graph"

REFUSED_CONVS: dict[type, str] = {
    gnn.CuGraphGATConv: _CUGRAPH,
    gnn.CuGraphRGCNConv: _CUGRAPH,
    gnn.CuGraphSAGEConv: _CUGRAPH,
    gnn.DynamicEdgeConv: _KNN,
    gnn.FusedGATConv: "it needs dgNN, and its kernels read the whole graph",
    gnn.GPSConv: "its attention runs over all nodes",
    gnn.GravNetConv: _KNN,
    gnn.HypergraphConv: "it passes messages between nodes and hyperedges, which belong to no chunk",
    gnn.PANConv: "it needs torch_sparse and multiplies powers of the whole adjacency",
    gnn.WLConv: "it numbers the colors of all nodes",
    gnn.XConv: _KNN,
}
"""Layers of `torch_geometric.nn.conv` that are not exact on chunks, and why."""
