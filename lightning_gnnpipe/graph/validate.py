"""Validate the user's graph, number of chunks and partition."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, GraphError

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_graph(edge_index: Tensor, num_nodes: int) -> None:
    """Raise GraphError unless there is a node and `edge_index` passes `check_edges`."""
    if num_nodes < 1:
        raise GraphError(
            expected="a graph of at least one node",
            found=str(num_nodes),
            remedy="Check where the graph comes from.",
        )
    check_edges(edge_index, num_nodes)


def check_edges(edges: Tensor, num_nodes: int, name: str = "edge_index") -> None:
    """Raise GraphError unless `edges` holds `[2, num_edges]` integers in `[0, num_nodes)`."""
    if edges.dtype not in _INTEGERS:
        raise GraphError(
            expected=f"'{name}' to hold integers",
            found=str(edges.dtype),
            remedy=f"Convert it by {name}.long().",
        )
    if edges.dim() != 2 or edges.size(0) != 2:
        raise GraphError(
            expected=f"'{name}' to have shape [2, num_edges]",
            found=str(list(edges.shape)),
            remedy="Row 0 holds the sources of the edges, row 1 their targets.",
        )
    if edges.numel() == 0:
        return
    low, high = int(edges.min()), int(edges.max())
    if low < 0 or high >= num_nodes:
        raise GraphError(
            expected=f"'{name}' to name nodes from 0 to {num_nodes - 1}",
            found=f"node {low if low < 0 else high}",
            remedy=f"The graph has {num_nodes} nodes: add the missing rows of node features, or "
            "correct the edges.",
        )


def check_num_chunks(num_chunks: int, num_nodes: int) -> None:
    """Raise ConfigError unless `num_chunks` is between 1 and `num_nodes`."""
    if not 1 <= num_chunks <= num_nodes:
        raise ConfigError(
            expected=f"'num_chunks' to be between 1 and the number of nodes, {num_nodes}",
            found=str(num_chunks),
            remedy="Leave it at 'auto' for 4 chunks per stage.",
        )


def check_assignment(assignment: Tensor, num_nodes: int, num_chunks: int) -> None:
    """Raise GraphError unless each node has a chunk number and no chunk is empty."""
    if assignment.dtype not in _INTEGERS or tuple(assignment.shape) != (num_nodes,):
        raise GraphError(
            expected=f"'partition' to be an integer tensor of shape [{num_nodes}]",
            found=f"{assignment.dtype} of shape {list(assignment.shape)}",
            remedy="Give each node the number of its chunk.",
        )
    low, high = int(assignment.min()), int(assignment.max())
    if low < 0 or high >= num_chunks:
        raise GraphError(
            expected=f"'partition' to name chunks from 0 to {num_chunks - 1}",
            found=f"chunk {low if low < 0 else high}",
            remedy="Number the chunks from 0, or correct 'num_chunks'.",
        )
    counts = torch.bincount(assignment.long(), minlength=num_chunks)
    if int(counts.min()) == 0:
        raise GraphError(
            expected="every chunk of 'partition' to have a node",
            found=f"chunk {int(counts.argmin())} has none",
            remedy="Number the chunks without gaps.",
        )
