"""Partition a graph into chunks and shards; fingerprints of graphs and tensors."""

from __future__ import annotations

from lightning_gnnpipe.graph.chunk import Chunk
from lightning_gnnpipe.graph.fingerprint import (
    ContentNumbers,
    fold,
    sample_of,
    tensor_fingerprint,
    tensors_in,
    text_fingerprint,
)
from lightning_gnnpipe.graph.partition import (
    SplitSizes,
    check_edges,
    check_graph,
    check_num_chunks,
    edge_cut_frac,
    edges_within,
    measure_split,
    partition_nodes,
    replicas_per_node,
    split_chunks,
)
from lightning_gnnpipe.graph.plan import (
    BatchPlan,
    ChunkPlan,
    MicroBatch,
    build_chunk_plan,
    chunk_order,
    plan_from_assignment,
    plan_micro_batches,
    shard_plan,
)

__all__ = [
    "BatchPlan",
    "Chunk",
    "ChunkPlan",
    "ContentNumbers",
    "MicroBatch",
    "SplitSizes",
    "build_chunk_plan",
    "check_edges",
    "check_graph",
    "check_num_chunks",
    "chunk_order",
    "edge_cut_frac",
    "edges_within",
    "fold",
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
