"""Bytes that a training step sends, exactly: pipeline against graph parallel.

The factor between the two is the reason to train in a pipeline: its bytes grow with the number of
cuts, `S - 1`, those of graph parallelism with the number of layers and of replicas of a node.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnnpipe.errors import ScheduleError, explain


def pipeline_bytes(
    *,
    num_stages: int,
    num_nodes: int,
    row_bytes: Sequence[int],
    output_row_bytes: int,
    tied_bytes: int = 0,
    backward: bool = True,
) -> int:
    """Return the bytes that all ranks send in a step of the pipeline.

    Every node row crosses every cut, its gradient crosses it back, and the outputs go from the last
    stage to all others: `2 N sum(row_bytes) + (S - 1) N output_row_bytes`. Gradients of weights
    that several stages use are summed from stage to stage, and the sum goes back: `2 tied_bytes`.

    Args:
        num_stages: Number of stages.
        num_nodes: Number of nodes of the graph.
        row_bytes: For each cut, bytes of one node's row of all tensors that cross it.
        output_row_bytes: Bytes of one node's row of the output.
        tied_bytes: Bytes of the weights that several stages use, once for each stage but the first.
        backward: Whether gradients are sent back.

    Raises:
        ScheduleError: If there is not one entry of `row_bytes` a cut.
    """
    num_cuts = num_stages - 1
    if len(row_bytes) != num_cuts:
        raise ScheduleError(
            explain(
                expected=f"'row_bytes' to have one entry for each of the {num_cuts} cuts",
                found=f"{len(row_bytes)} entries",
                remedy="There is one cut between any two neighbouring stages.",
            )
        )
    rows = num_nodes * sum(row_bytes)
    gradients = rows + 2 * tied_bytes if backward else 0
    return rows + gradients + num_cuts * num_nodes * output_row_bytes


def graph_parallel_bytes(
    *,
    num_layers: int,
    replicas_per_node: float,
    num_nodes: int,
    row_bytes: int,
    weight_bytes: int,
    num_shards: int,
) -> int:
    """Return the bytes that all ranks send in a step of graph parallelism.

    Every layer sends each row to the shards that hold a replica of the node, and gets the gradients
    back; a ring all-reduce of the weights follows: `2 L alpha N row_bytes + 2 (G - 1) |W|`.

    Args:
        num_layers: Number of layers that exchange rows.
        replicas_per_node: Mean number of shards, besides its own, that hold a copy of a node
            (alpha). Times `num_nodes` it is a whole number, to which it is rounded.
        num_nodes: Number of nodes of the graph.
        row_bytes: Bytes of one node's row in a layer.
        weight_bytes: Bytes of all weights (|W|).
        num_shards: Number of graph shards.
    """
    num_replicas = round(replicas_per_node * num_nodes)
    return 2 * num_layers * num_replicas * row_bytes + 2 * (num_shards - 1) * weight_bytes
