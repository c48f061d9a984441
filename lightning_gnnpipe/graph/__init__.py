"""Partition a graph into chunks and shards; fingerprints of graphs and tensors."""

from lightning_gnnpipe.graph.chunk import Chunk
from lightning_gnnpipe.graph.fingerprint import (
    ContentNumbers,
    fold,
    tensor_fingerprint,
    tensors_in,
    text_fingerprint,
)
from lightning_gnnpipe.graph.kept import keep_parts
from lightning_gnnpipe.graph.partition import (
    SplitSizes,
    check_edges,
    check_graph,
    check_num_chunks,
    edge_cut_frac,
    edges_within,
    first_not_finite,
    measure_split,
    partition_nodes,
    split_chunks,
    starts_of,
)
from lightning_gnnpipe.graph.plan import (
    BatchPlan,
    ChunkPlan,
    MicroBatch,
    chunk_order,
    cut_in_turn,
    plan_from_assignment,
    plan_micro_batches,
    shard_plan,
)
from lightning_gnnpipe.graph.stored import StoredGraph, open_stored, write_stored, written_whole
