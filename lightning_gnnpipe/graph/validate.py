"""Validate the user's graph, number of chunks and partition."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, GraphError, explain

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_graph(edge_index: Tensor, num_nodes: int) -> None:
    """Raise GraphError unless `edge_index` holds `[2, num_edges]` integers in `[0, num_nodes)`."""
    if not isinstance(edge_index, Tensor):
        raise GraphError(
            explain(
                expected="'edge_index' to be a torch.Tensor",
                found=type(edge_index).__name__,
                remedy="Convert it by torch.tensor(edge_index).",
            )
        )
    if num_nodes < 1:
        raise GraphError(
            explain(
                expected="a graph of at least one node",
                found=str(num_nodes),
                remedy="Check where the graph comes from.",
            )
        )
    if edge_index.dtype not in _INTEGERS:
        raise GraphError(
            explain(
                expected="'edge_index' to hold integers",
                found=str(edge_index.dtype),
                remedy="Convert it by edge_index.long().",
            )
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise GraphError(
            explain(
                expected="'edge_index' to have shape [2, num_edges]",
                found=str(list(edge_index.shape)),
                remedy="Row 0 holds the sources of the edges, row 1 their targets.",
            )
        )
    if edge_index.numel() == 0:
        return
    low, high = int(edge_index.min()), int(edge_index.max())
    if low < 0 or high >= num_nodes:
        raise GraphError(
            explain(
                expected=f"'edge_index' to name nodes from 0 to {num_nodes - 1}",
                found=f"node {low if low < 0 else high}",
                remedy=f"The node features have {num_nodes} rows: add the missing rows, or correct "
                "the edges.",
            )
        )


def check_num_chunks(num_chunks: int, num_nodes: int) -> None:
    """Raise ConfigError unless `num_chunks` is an integer between 1 and `num_nodes`."""
    if not isinstance(num_chunks, int) or isinstance(num_chunks, bool):
        raise ConfigError(
            explain(
                expected="'num_chunks' to be an integer",
                found=repr(num_chunks),
                remedy="Leave it at 'auto' for 4 chunks a stage.",
            )
        )
    if not 1 <= num_chunks <= num_nodes:
        raise ConfigError(
            explain(
                expected=f"'num_chunks' to be between 1 and the number of nodes, {num_nodes}",
                found=str(num_chunks),
                remedy="Leave it at 'auto' for 4 chunks a stage.",
            )
        )


def check_assignment(assignment: Tensor, num_nodes: int, num_chunks: int) -> None:
    """Raise GraphError unless each node has a chunk number and no chunk is empty."""
    if assignment.dtype not in _INTEGERS or tuple(assignment.shape) != (num_nodes,):
        raise GraphError(
            explain(
                expected=f"'partition' to be an integer tensor of shape [{num_nodes}]",
                found=f"{assignment.dtype} of shape {list(assignment.shape)}",
                remedy="Give the number of its chunk for each node.",
            )
        )
    low, high = int(assignment.min()), int(assignment.max())
    if low < 0 or high >= num_chunks:
        raise GraphError(
            explain(
                expected=f"'partition' to name chunks from 0 to {num_chunks - 1}",
                found=f"chunk {low if low < 0 else high}",
                remedy="Number the chunks from 0, or correct 'num_chunks'.",
            )
        )
    counts = torch.bincount(assignment.long(), minlength=num_chunks)
    if int(counts.min()) == 0:
        raise GraphError(
            explain(
                expected="every chunk of 'partition' to have a node",
                found=f"chunk {int(counts.argmin())} has none",
                remedy="Number the chunks without gaps.",
            )
        )
