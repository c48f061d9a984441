"""From a graph to chunks."""

from __future__ import annotations

from lightning_gnnpipe.graph.build import build_chunk_plan
from lightning_gnnpipe.graph.chunk import Chunk, Peer
from lightning_gnnpipe.graph.cut import (
    SplitSizes,
    edge_cut_frac,
    edges_within,
    measure_split,
    replicas_per_node,
)
from lightning_gnnpipe.graph.fingerprint import (
    fold,
    graph_fingerprint,
    tensor_fingerprint,
    text_fingerprint,
)
from lightning_gnnpipe.graph.micro_batches import BatchPlan, MicroBatch, plan_micro_batches
from lightning_gnnpipe.graph.order import chunk_order
from lightning_gnnpipe.graph.partition import partition_nodes
from lightning_gnnpipe.graph.plan import (
    ChunkPlan,
    plan_from_assignment,
    shard_plan,
)
from lightning_gnnpipe.graph.split import split_chunks
from lightning_gnnpipe.graph.validate import check_graph, check_num_chunks

__all__ = [
    "BatchPlan",
    "Chunk",
    "ChunkPlan",
    "MicroBatch",
    "Peer",
    "SplitSizes",
    "build_chunk_plan",
    "check_graph",
    "check_num_chunks",
    "chunk_order",
    "edge_cut_frac",
    "edges_within",
    "fold",
    "graph_fingerprint",
    "measure_split",
    "partition_nodes",
    "plan_from_assignment",
    "plan_micro_batches",
    "replicas_per_node",
    "shard_plan",
    "split_chunks",
    "tensor_fingerprint",
    "text_fingerprint",
]
