"""Which tensors of a batch belong to nodes, which to edges.

They are cut by chunk; the others are passed whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lightning_gnnpipe.errors import GraphError, UnsupportedError, explain
from lightning_gnnpipe.stages.call import Call


class Kind(Enum):
    """What the first dimension of a tensor counts."""

    NODE = "node"
    EDGE = "edge"
    EDGE_INDEX = "edge_index"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The kinds of a call's leaves and the size of its graph."""

    kinds: tuple[Kind, ...]
    num_nodes: int
    edge_index: Tensor


def classify(call: Call) -> Inputs:
    """Say of each tensor of `call` what its first dimension counts.

    Raises:
        GraphError: If there is no `edge_index`, or no tensor with one row a node.
        UnsupportedError: If there are several graphs.
    """
    edge_slot = _find_edge_index(call)
    edge_index = call.leaves[edge_slot]
    num_edges = edge_index.size(1) if edge_index.dim() == 2 else -1
    num_nodes = _count_nodes(call, edge_slot, num_edges)
    kinds = []
    for slot, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
        rows = leaf.size(0) if leaf.dim() else -1
        is_edge_name = name.rsplit(".", 1)[-1].startswith("edge")
        if slot == edge_slot:
            kinds.append(Kind.EDGE_INDEX)
        elif rows == num_edges and (num_edges != num_nodes or is_edge_name):
            kinds.append(Kind.EDGE)
        elif rows == num_nodes and not is_edge_name:
            kinds.append(Kind.NODE)
        elif is_edge_name:
            raise GraphError(
                explain(
                    expected=f"'{name}' to have one row for each of the {num_edges} edges",
                    found=f"shape {list(leaf.shape)}",
                    remedy="Pass edge features in the order of 'edge_index'.",
                )
            )
        else:
            kinds.append(Kind.WHOLE)
    return Inputs(tuple(kinds), num_nodes, edge_index)


def _find_edge_index(call: Call) -> int:
    named = [i for i, name in enumerate(call.names) if name.rsplit(".", 1)[-1] == "edge_index"]
    shaped = [
        i
        for i, leaf in enumerate(call.leaves)
        if leaf.dim() == 2 and leaf.size(0) == 2 and leaf.dtype in (torch.int64, torch.int32)
    ]
    found = named or shaped
    if len(found) > 1:
        raise UnsupportedError(
            explain(
                expected="one graph in each call of the pipelined module",
                found=", ".join(f"'{call.names[i]}'" for i in found),
                remedy="Pass one 'edge_index'; several relations are not pipelined.",
            )
        )
    if not found:
        raise GraphError(
            explain(
                expected="an 'edge_index' of shape [2, num_edges] among the arguments of the "
                "pipelined module",
                found=", ".join(call.names) or "no tensor",
                remedy="Pass the graph as 'edge_index' to its forward.",
            )
        )
    return found[0]


def _count_nodes(call: Call, edge_slot: int, num_edges: int) -> int:
    if call.num_nodes is not None:
        _check_features(call, call.num_nodes)
        return call.num_nodes
    others = [
        (name.rsplit(".", 1)[-1], leaf)
        for i, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True))
        if i != edge_slot and leaf.dim() > 0
    ]
    for name, leaf in others:
        if name == "x":
            return leaf.size(0)
    for name, leaf in others:
        if not name.startswith("edge") and leaf.size(0) != num_edges:
            return leaf.size(0)
    for name, leaf in others:
        if not name.startswith("edge"):
            return leaf.size(0)
    raise GraphError(
        explain(
            expected="a tensor with one row a node among the arguments of the pipelined module",
            found=", ".join(call.names),
            remedy="Pass node features; learned embeddings can be looked up with a node-level "
            "index.",
        )
    )


def _check_features(call: Call, num_nodes: int) -> None:
    for name, leaf in zip(call.names, call.leaves, strict=True):
        if name.rsplit(".", 1)[-1] == "x" and leaf.size(0) != num_nodes:
            raise GraphError(
                explain(
                    expected=f"'{name}' to have one row for each of the {num_nodes} nodes of the "
                    "graph",
                    found=f"{leaf.size(0)} rows",
                    remedy="Add the missing rows, or correct 'num_nodes'.",
                )
            )
