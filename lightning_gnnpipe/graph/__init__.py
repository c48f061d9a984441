"""Partition a graph into chunks and shards; fingerprints of graphs and tensors."""

from __future__ import annotations

from lightning_gnnpipe.graph.batch_plan import BatchPlan, MicroBatch, plan_micro_batches
from lightning_gnnpipe.graph.chunk import Chunk
from lightning_gnnpipe.graph.edge_cut import (
    SplitSizes,
    edge_cut_frac,
    edges_within,
    measure_split,
    replicas_per_node,
)
from lightning_gnnpipe.graph.fingerprint import (
    ContentNumbers,
    fold,
    graph_fingerprint,
    sample_of,
    tensor_fingerprint,
    tensors_in,
    text_fingerprint,
)
from lightning_gnnpipe.graph.partition import partition_nodes
from lightning_gnnpipe.graph.plan import (
    ChunkPlan,
    build_chunk_plan,
    chunk_order,
    plan_from_assignment,
    shard_plan,
)
from lightning_gnnpipe.graph.shard_partition import split_chunks
from lightning_gnnpipe.graph.validate import check_graph, check_num_chunks

__all__ = [
    "BatchPlan",
    "Chunk",
    "ChunkPlan",
    "ContentNumbers",
    "MicroBatch",
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
    "sample_of",
    "shard_plan",
    "split_chunks",
    "tensor_fingerprint",
    "tensors_in",
    "text_fingerprint",
]
