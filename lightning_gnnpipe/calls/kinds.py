"""Classify the arguments of a call as rows of nodes or edges, or as whole tensors.

Rows of nodes and edges are cut by chunk. Other arguments are passed whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.calls.call import Call, is_of_pairs, last_name
from lightning_gnnpipe.calls.graph_batch import GraphBatch, Kind
from lightning_gnnpipe.errors import GraphError, UnsupportedError
from lightning_gnnpipe.passing import refuse_shape

_NAME = re.compile("(?<![a-z])edge_index")


@dataclass(frozen=True, slots=True)
class EdgeSets:
    """The leaves of a call that hold edges, by leaf index in `slots`."""

    slots: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # edges; -1 for a leaf that is not 2-dimensional

    def is_edge_name(self, name: str) -> bool:
        """Whether a tensor of this name must belong to edges."""
        if len(self.slots) == 1:
            return last_name(name).startswith("edge")
        return any(re.match("(.*_)?edge_", word) for word in name.split("."))

    def owner(self, name: str, rows: int) -> int:
        """Return the edge set of a tensor with `rows` rows; for equal sizes its name decides.

        `rows`: -1 for a scalar.
        """
        found = [i for i, size in enumerate(self.sizes) if size == rows]
        if not found:
            raise GraphError(
                expected=f"'{name}' to have one row for each of the "
                f"{' or '.join(map(str, self.sizes))} edges",
                found="a scalar" if rows < 0 else f"{rows} rows",
                remedy="Pass edge features in the order of 'edge_index'.",
            )
        if len(found) > 1:
            found = [i for i in found if _stem(self.names[i]) == _stem(name)]
        if len(found) != 1:
            same = [n for n, size in zip(self.names, self.sizes, strict=True) if size == rows]
            raise UnsupportedError(
                expected=f"'{name}' to be named after the edges it belongs to",
                found=f"{rows} rows; {' and '.join(map(repr, same))} have {rows} edges each",
                remedy="Use the same prefix, as in 'pos_edge_weight' for 'pos_edge_index', or "
                "the same key of a dict.",
            )
        return found[0]


def find_edge_sets(call: Call, *, needs_edges: bool = True) -> EdgeSets:
    """Return the leaves with "edge_index" in their names, else the only leaf of edge shape.

    Raises GraphError for missing or malformed edges, UnsupportedError if several leaves have edge
    shape and no name decides.
    """
    named = [
        i
        for i, name in enumerate(call.names)
        if _NAME.search(name) and i not in call.matrices and last_name(name) != "edge_weight"
    ]
    shaped = [i for i, leaf in enumerate(call.leaves) if _is_edges(leaf)]
    found = named or shaped
    if not found and needs_edges:
        raise GraphError(
            expected="an 'edge_index' of shape [2, num_edges] among the arguments of the "
            "pipelined module",
            found=", ".join(
                f"'{name}', {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
                for name, leaf in zip(call.names, call.leaves, strict=True)
            )
            or "no tensor",
            remedy="Pass the edges to its forward as 'edge_index', of dtype torch.long.",
        )
    if len(found) > 1 and not named:
        raise UnsupportedError(
            expected="names that show which arguments of the pipelined module are edges",
            found=", ".join(f"'{call.names[i]}'" for i in found),
            remedy="Name the edges 'edge_index'. Name several edge sets over the same nodes "
            "'..._edge_index', or put them into a dict 'edge_index_dict'.",
        )
    for i in found:
        if len(found) > 1 and not _is_edges(call.leaves[i]):
            raise GraphError(
                expected=f"'{call.names[i]}' to hold integers in shape [2, num_edges]",
                found=f"{call.leaves[i].dtype} of shape {list(call.leaves[i].shape)}",
                remedy="Row 0 holds the sources of the edges, row 1 their targets.",
            )
    edges = [call.leaves[i] for i in found]
    sizes = tuple(leaf.size(1) if leaf.dim() == 2 else -1 for leaf in edges)
    return EdgeSets(tuple(found), tuple(call.names[i] for i in found), sizes)


def _is_edges(leaf: Tensor) -> bool:
    is_index = leaf.dtype in (torch.int64, torch.int32)
    return is_index and leaf.dim() == 2 and leaf.size(0) == 2


def _stem(name: str) -> str:
    """Return the part of a name that all tensors of the same edge set share."""
    return re.sub("edge_[a-z]+", "edge", name)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The kinds of a call's leaves and the size of its graph.

    Attributes:
        kinds: For each leaf, what its first dimension counts.
        edge_index: `[2, num_edges]` all edge sets, concatenated.
        edge_sets: For each leaf the edge set that it holds or belongs to; 0 for non-edge leaves.
        graphs: Set if the call has a batch of graphs; `edge_index` is then empty.
    """

    kinds: tuple[Kind, ...]
    num_nodes: int
    edge_index: Tensor
    edge_sizes: tuple[int, ...]
    edge_sets: tuple[int, ...]
    graphs: GraphBatch | None = None

    def num_rows(self, kind: Kind, edge_set: int) -> int:
        """Return the rows of a tensor of nodes, of graphs, or of edges of one set."""
        if kind is Kind.GRAPH and self.graphs is not None:
            return self.graphs.num_graphs
        return self.num_nodes if kind is Kind.NODE else self.edge_sizes[edge_set]


def classify_graph(call: Call) -> Inputs:
    """Find out what the first dimension of each tensor counts, in a call with one graph."""
    edges = find_edge_sets(call)
    num_nodes = count_nodes(call, edges)
    kinds, numbers = [], []
    for slot, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
        rows = leaf.size(0) if leaf.dim() else -1
        if slot in call.matrices and rows != num_nodes:
            raise refuse_shape(call.matrices[slot], f"{rows} rows for {num_nodes} nodes")
        is_edge_name = edges.is_edge_name(name) and not is_of_pairs(name)
        is_edge_name = is_edge_name and slot not in call.matrices
        if call.num_nodes is not None and "." in name and rows not in edges.sizes:
            is_edge_name = False  # of a Data, and forward may read none of it
        kind, number = Kind.WHOLE, 0
        if slot in edges.slots:
            kind, number = Kind.EDGE_INDEX, edges.slots.index(slot)
        elif is_edge_name or (rows in edges.sizes and rows != num_nodes):
            kind, number = Kind.EDGE, edges.owner(name, rows)
        elif rows == num_nodes:
            kind = Kind.NODE
        kinds.append(kind)
        numbers.append(number)
    joined = call.join(edges.slots)
    return Inputs(tuple(kinds), num_nodes, joined, edges.sizes, tuple(numbers))


def check_node_types(call: Call) -> None:
    """Refuse features of node types that differ in size; keys of `edge_index_dict` name the types.

    Features are tensors of at least two dimensions in a dict, by type.
    """
    args, kwargs = call.arguments
    dicts = [one for one in (*args, *kwargs.values()) if isinstance(one, dict)]
    keys = [key for one in dicts for key in one if isinstance(key, tuple) and len(key) == 3]
    types = dict.fromkeys(end for source, _, target in keys for end in (source, target))
    for one in dicts:
        found = {key: one[key] for key in types if isinstance(one.get(key), Tensor)}
        rows = {key: leaf.size(0) for key, leaf in found.items() if leaf.dim() > 1}
        if len(set(rows.values())) > 1:
            raise UnsupportedError(
                expected="node types of the same size",
                found=", ".join(f"'{name}' of {count} rows" for name, count in rows.items()),
                remedy="Make one type of them by HeteroData.to_homogeneous(). RGCNConv and "
                "RGATConv take its edge types.",
            )


def count_nodes(call: Call, edges: EdgeSets) -> int:
    """Return the number of nodes; raise GraphError if no argument shows it."""
    if call.num_nodes is not None:
        for name, leaf in zip(call.names, call.leaves, strict=True):
            if last_name(name) == "x" and leaf.size(0) != call.num_nodes:
                raise GraphError(
                    expected=f"'{name}' to have one row for each of the {call.num_nodes} nodes of "
                    "the graph",
                    found=f"{leaf.size(0)} rows",
                    remedy="Add the missing rows, or correct 'num_nodes'.",
                )
        return call.num_nodes
    leaf_rows = [
        (last_name(name), leaf.size(0))
        for i, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True))
        if i not in edges.slots and leaf.dim() > 0 and not edges.is_edge_name(name)
    ]
    likely = [rows for name, rows in leaf_rows if name == "x"]
    likely += [rows for _, rows in leaf_rows if rows not in edges.sizes]
    likely += [rows for _, rows in leaf_rows]
    if likely:
        return likely[0]
    counted = None if call.batch_nodes is None else call.batch_nodes()
    if counted is None:
        raise GraphError(
            expected="an argument of the pipelined module with one row per node",
            found=", ".join(call.names),
            remedy="Pass node features. For learned embeddings pass torch.arange(num_nodes), and "
            "look them up with it.",
        )
    return counted
