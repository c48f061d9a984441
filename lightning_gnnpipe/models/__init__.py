"""Reference stacks in plain PyG, and the LightningModules that train them."""

from lightning_gnnpipe.models.classifiers import GraphClassifier, NodeClassifier
from lightning_gnnpipe.models.deep import GCNII, GNN, ResGCNPlus
from lightning_gnnpipe.models.gin import GIN

__all__ = [
    "GCNII",
    "GIN",
    "GNN",
    "GraphClassifier",
    "NodeClassifier",
    "ResGCNPlus",
]
