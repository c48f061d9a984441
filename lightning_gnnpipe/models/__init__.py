"""Reference stacks in plain PyG, and the LightningModules that train them."""

from lightning_gnnpipe.models.classifier import NodeClassifier
from lightning_gnnpipe.models.gcnii import GCNII
from lightning_gnnpipe.models.gin import GIN
from lightning_gnnpipe.models.gnn import GNN
from lightning_gnnpipe.models.graph_classifier import GraphClassifier
from lightning_gnnpipe.models.resgcnplus import ResGCNPlus

__all__ = [
    "GCNII",
    "GIN",
    "GNN",
    "GraphClassifier",
    "NodeClassifier",
    "ResGCNPlus",
]
