"""Reference deep stacks in plain PyG, and the LightningModule that trains them.

The stacks know nothing of pipelines: each is written for one device and one whole graph.
"""

from lightning_gnnpipe.models.classifier import NodeClassifier
from lightning_gnnpipe.models.gcn import GCN
from lightning_gnnpipe.models.gcnii import GCNII
from lightning_gnnpipe.models.graphsage import GraphSAGE
from lightning_gnnpipe.models.resgcnplus import ResGCNPlus

__all__ = ["GCN", "GCNII", "GraphSAGE", "NodeClassifier", "ResGCNPlus"]
