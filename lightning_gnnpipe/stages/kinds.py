"""Which tensors of a batch belong to nodes, which to edges.

They are cut by chunk; the others are passed whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gnnpipe.errors import GraphError, explain
from lightning_gnnpipe.stages.call import Call
from lightning_gnnpipe.stages.edges import EdgeSets, find_edge_sets, is_label_name
from lightning_gnnpipe.stages.graph_batch import GraphBatch, Kind


@dataclass(frozen=True, slots=True)
class Inputs:
    """The kinds of a call's leaves and the size of its graph.

    Attributes:
        kinds: For each leaf what its first dimension counts.
        num_nodes: Nodes, N.
        edge_index: `[2, num_edges]` the edges; of several edge sets one after the other.
        edge_sizes: `[num_edge_sets]` edges in each edge set.
        edge_sets: For each leaf the edge set that it holds or belongs to; 0 for other leaves.
        graphs: The graphs, if it is a batch of them; the other attributes then tell no more.
    """

    kinds: tuple[Kind, ...]
    num_nodes: int
    edge_index: Tensor
    edge_sizes: tuple[int, ...]
    edge_sets: tuple[int, ...]
    graphs: GraphBatch | None = None

    def num_rows(self, kind: Kind, edge_set: int) -> int:
        """Return the rows of a tensor of nodes, or of the edges of one set."""
        return self.num_nodes if kind is Kind.NODE else self.edge_sizes[edge_set]


def classify_graph(call: Call) -> Inputs:
    """Say of each tensor of `call`, which holds one graph, what its first dimension counts.

    Raises:
        GraphError: If there is no `edge_index`, or no tensor with one row a node.
        UnsupportedError: If it cannot be told which edges there are, or which a tensor belongs to.
    """
    edges = find_edge_sets(call)
    num_nodes = _count_nodes(call, edges)
    kinds, numbers = [], []
    for slot, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
        rows = leaf.size(0) if leaf.dim() else -1
        is_edge_name = edges.is_edge_name(name) and not is_label_name(name)
        kind, number = Kind.WHOLE, 0
        if slot in edges.slots:
            kind, number = Kind.EDGE_INDEX, edges.slots.index(slot)
        elif rows in edges.sizes and (rows != num_nodes or is_edge_name):
            kind, number = Kind.EDGE, edges.owner(name, rows)
        elif rows == num_nodes and not is_edge_name:
            kind = Kind.NODE
        elif is_edge_name:
            wanted = " or ".join(map(str, edges.sizes))
            raise GraphError(
                explain(
                    expected=f"'{name}' to have one row for each of the {wanted} edges",
                    found=f"shape {list(leaf.shape)}",
                    remedy="Pass edge features in the order of 'edge_index'.",
                )
            )
        kinds.append(kind)
        numbers.append(number)
    return Inputs(tuple(kinds), num_nodes, edges.join(call), edges.sizes, tuple(numbers))


def _count_nodes(call: Call, edges: EdgeSets) -> int:
    if call.num_nodes is not None:
        _check_features(call, call.num_nodes)
        return call.num_nodes
    others = [
        (name.rsplit(".", 1)[-1], leaf)
        for i, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True))
        if i not in edges.slots and leaf.dim() > 0 and not edges.is_edge_name(name)
    ]
    for name, leaf in others:
        if name == "x":
            return leaf.size(0)
    for _, leaf in others:
        if leaf.size(0) not in edges.sizes:
            return leaf.size(0)
    for _, leaf in others:
        return leaf.size(0)
    counted = None if call.batch_nodes is None else call.batch_nodes()
    if counted is None:
        raise GraphError(
            explain(
                expected="a tensor with one row a node among the arguments of the pipelined module",
                found=", ".join(call.names),
                remedy="Pass node features; for learned embeddings pass "
                "torch.arange(num_nodes), and look them up with it.",
            )
        )
    return counted


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
