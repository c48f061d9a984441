"""From a graph to a plan: checked, dealt out to chunks by some method, and cut."""

from __future__ import annotations

from torch import Tensor

from lightning_gnnpipe.graph.partition import partition_nodes
from lightning_gnnpipe.graph.plan import ChunkPlan, plan_from_assignment
from lightning_gnnpipe.graph.validate import check_graph
from lightning_gnnpipe.types import Partition


def build_chunk_plan(
    edge_index: Tensor,
    num_nodes: int,
    *,
    num_chunks: int,
    partition: Partition = "metis",
    seed: int = 0,
) -> ChunkPlan:
    """Cut a graph into chunks.

    Args:
        edge_index: `[2, num_edges]` sources and targets; multi-edges and self-loops are kept as
            they are.
        num_nodes: Nodes, N.
        num_chunks: Chunks, K, at most N.
        partition: A method, or `[num_nodes]` the chunk of each node.
        seed: Seed of the methods.

    Raises:
        GraphError: If the graph or the partition is malformed.
        ConfigError: If `num_chunks` is not between 1 and N.
    """
    check_graph(edge_index, num_nodes)
    assignment = partition_nodes(
        edge_index, num_nodes, num_chunks=num_chunks, method=partition, seed=seed
    )
    return plan_from_assignment(edge_index, num_nodes, assignment)
