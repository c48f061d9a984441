"""Bytes that the ranks of a step send each other, by formula."""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_bytes(
    *,
    num_nodes: int,
    row_bytes: Sequence[int],
    output_row_bytes: int,
    weight_bytes: int,
    tied_bytes: int = 0,
) -> int:
    """Return the bytes of a step: `2 N sum(row_bytes) + (S - 1) (N output_row_bytes + |W|)`.

    Each row crosses each cut, its gradient returns, and the last stage sends the outputs to all
    other stages, as each stage does with the gradients of its weights. `row_bytes`: for each of the
    S - 1 cuts, bytes of one node's rows. `weight_bytes`: bytes of all weights of stages.
    `tied_bytes`: of those in several stages, whose gradients are summed, which sends twice as much.
    """
    to_all = num_nodes * output_row_bytes + weight_bytes + tied_bytes
    return 2 * num_nodes * sum(row_bytes) + len(row_bytes) * to_all


def graph_parallel_bytes(
    *,
    num_layers: int,
    replicas_per_node: float,
    num_nodes: int,
    row_bytes: int,
    weight_bytes: int,
    num_shards: int,
) -> int:
    """Return the bytes of a graph-parallel step: `2 L alpha N row_bytes + 2 (G - 1) |W|`.

    Each layer sends each row to the shards with a replica and gets its gradient back; a ring
    all-reduce of the weights follows. `replicas_per_node` (alpha): mean number of other shards with
    a copy of a node.
    """
    num_replicas = round(replicas_per_node * num_nodes)
    return 2 * num_layers * num_replicas * row_bytes + 2 * (num_shards - 1) * weight_bytes
