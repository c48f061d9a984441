"""Bytes that a training step sends, exactly: pipeline parallel and graph parallel."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnnpipe.errors import ScheduleError


def pipeline_bytes(
    *,
    num_stages: int,
    num_nodes: int,
    row_bytes: Sequence[int],
    output_row_bytes: int,
    tied_bytes: int = 0,
    backward: bool = True,
) -> int:
    """Return the bytes of a pipelined step: `2 N sum(row_bytes) + (S - 1) N output_row_bytes`.

    Each row crosses each cut, its gradient returns, and the last stage sends the outputs to all
    other stages. `row_bytes`: for each cut, bytes of one node's rows. `tied_bytes`: bytes of
    weights shared by several stages, once for each stage but the first; adds `2 tied_bytes`, since
    their gradients are summed from stage to stage and sent back.
    """
    num_cuts = num_stages - 1
    if len(row_bytes) != num_cuts:
        raise ScheduleError(
            expected=f"'row_bytes' to have one entry for each of the {num_cuts} cuts",
            found=f"{len(row_bytes)} entries",
            remedy="There is one cut between any two neighbouring stages.",
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
    """Return the bytes of a graph-parallel step: `2 L alpha N row_bytes + 2 (G - 1) |W|`.

    Each layer sends each row to the shards with a replica and gets its gradient back; a ring
    all-reduce of the weights follows. `replicas_per_node` (alpha): mean number of other shards with
    a copy of a node.
    """
    num_replicas = round(replicas_per_node * num_nodes)
    return 2 * num_layers * num_replicas * row_bytes + 2 * (num_shards - 1) * weight_bytes
