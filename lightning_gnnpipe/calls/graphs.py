"""Classify the arguments of a call with a batch of graphs, and find the graph of each row.

The batch is a batch vector (`batch`: the graph of each node) or a PyG `Batch`. A `Batch` records
how it concatenated each attribute. Other tensors are classified by name and number of rows;
ambiguous ones raise an error, unless an earlier batch was unambiguous.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

from lightning_gnnpipe.calls.call import COUNTS, Call, is_batch_name, with_batch_vector
from lightning_gnnpipe.calls.graph_batch import GraphBatch, Kind, LeafRows, starts_of
from lightning_gnnpipe.calls.kinds import EdgeSets, Inputs, classify_graph, find_edge_sets
from lightning_gnnpipe.errors import GraphError, explain

KnownKinds = MutableMapping[str, tuple[Kind, int]]
"""What earlier batches have told of tensors, by name."""

_OF_NODES = ("x", "pos", "z")
_OF_GRAPHS = ("y", "u")


def classify(call: Call, known: KnownKinds | None = None) -> Inputs:
    """Find out for each tensor of `call` what its rows are, in one graph or a batch of graphs.

    `known`: kinds found in earlier batches, by name; updated in place. Raises GraphError and
    UnsupportedError for malformed or ambiguous arguments.
    """
    if not call.has_graphs:
        return classify_graph(call)
    edges = find_edge_sets(call, needs_edges=False)
    finder = _Finder(call, edges, {} if known is None else known)
    leaves = tuple(finder.find(slot) for slot in range(len(call.leaves)))
    graphs = GraphBatch(
        finder.num_graphs,
        finder.num_filled,
        finder.sizes,
        finder.graph_of_node,
        tuple(finder.row_sets),
        leaves,
    )
    kinds = tuple(
        Kind.EDGE_INDEX if slot in edges.slots else rows.kind for slot, rows in enumerate(leaves)
    )
    none = torch.empty((2, 0), dtype=torch.int64, device=finder.graph_of_node.device)
    numbers = tuple(rows.number for rows in leaves)
    sizes = tuple(graphs.numel() for graphs in finder.row_sets)
    return Inputs(kinds, len(finder.graph_of_node), none, sizes, numbers, graphs)


def find_graphs(call: Call, graph_of_node: Tensor | None, known: KnownKinds) -> tuple[Call, Inputs]:
    """Classify `call`, with `graph_of_node` as its batch vector if it fits; return both.

    `graph_of_node`: `[num_nodes]` the batch vector of the user's batch. It is used if the call has
    none, the numbers of nodes are equal, and no edge joins two graphs.
    """
    if call.has_graphs or graph_of_node is None:
        return call, classify(call, known)
    inputs = classify(call, known)
    if inputs.num_nodes == graph_of_node.numel():
        with_graphs = with_batch_vector(call, graph_of_node)
        try:
            return with_graphs, classify(with_graphs, known)
        except GraphError:  # edges join graphs: treat them as one graph
            return call, inputs
    return call, inputs


class _Finder:
    """Finds the graph of each row of a call with a batch vector; updates `known`."""

    def __init__(self, call: Call, edges: EdgeSets, known: KnownKinds) -> None:
        self._call, self._edges, self._known = call, edges, known
        self._last_names = [name.rsplit(".", 1)[-1] for name in call.names]
        self.graph_of_node = self._find_batch()
        self.num_filled = int(self.graph_of_node[-1]) + 1 if self.graph_of_node.numel() else 0
        self.num_graphs = self._count_graphs()
        counts = torch.bincount(self.graph_of_node, minlength=self.num_graphs)
        self.sizes = tuple(int(size) for size in counts.tolist())
        self._starts = starts_of(self.sizes, self.graph_of_node.device)
        self.row_sets = [self._graphs_of_edges(slot) for slot in edges.slots]
        self._set_starts: list[Tensor] = [self._ends_of(graphs) for graphs in self.row_sets]

    def find(self, slot: int) -> LeafRows:
        """Return how leaf `slot` is split."""
        name, leaf = self._last_names[slot], self._call.leaves[slot]
        rows = leaf.size(0) if leaf.dim() else -1
        if slot in self._edges.slots:
            number = self._edges.slots.index(slot)
            return LeafRows(Kind.EDGE, number, 1, self._starts[:-1], self._starts.diff())
        if name == "batch":
            numbers = torch.arange(self.num_graphs, device=leaf.device)
            return LeafRows(Kind.NODE, 0, 0, numbers, torch.ones_like(numbers))
        if name == "ptr":
            return self._find_ptr(leaf)
        if leaf.dim() == 0 and name in COUNTS:
            raise _malformed(
                f"'{self._call.names[slot]}', the number of graphs, to be a plain integer",
                "a tensor",
                "Pass int(...) of it.",
            )
        slices = self._call.slices.get(slot)
        if slices is not None and slices.starts.numel() == self.num_graphs + 1:
            dim = slices.dim % max(leaf.dim(), 1)
            if leaf.dim() and leaf.size(dim) == int(slices.starts[-1]):
                return self._from_slices(slot, slices.starts.to(leaf.device), dim)
        kind, number = self._by_size(self._call.names[slot], rows)
        return LeafRows(kind, number)

    def _find_batch(self) -> Tensor:
        slot = next(i for i, name in enumerate(self._call.names) if is_batch_name(name))
        name, batch = self._call.names[slot], self._call.leaves[slot]
        num_nodes = self._call.num_nodes
        for other, leaf in zip(self._last_names, self._call.leaves, strict=True):
            if other == "x" and num_nodes is None and leaf.dim() == 2:
                num_nodes = leaf.size(0)
        if num_nodes is not None and batch.numel() != num_nodes:
            raise _malformed(
                f"'{name}' to have one entry for each of the {num_nodes} nodes",
                f"{batch.numel()}",
                "It says of each node which graph it belongs to.",
            )
        is_sorted = bool((batch[1:] >= batch[:-1]).all())
        if batch.dtype != torch.int64 or not is_sorted or bool((batch[:1] < 0).any()):
            raise _malformed(
                f"'{name}' to hold graph numbers of type torch.int64, ascending from 0",
                f"{batch.dtype}" + ("" if is_sorted else ", not ascending"),
                "Sort the nodes by graph, as torch_geometric.data.Batch does.",
            )
        return batch

    def _count_graphs(self) -> int:
        found = dict(self._call.counts)
        for name, last, leaf in zip(
            self._call.names, self._last_names, self._call.leaves, strict=True
        ):
            if last == "ptr" and leaf.dim() == 1:
                found[name] = leaf.numel() - 1
        counts = set(found.values())
        if len(counts) > 1 or any(count < self.num_filled for count in counts):
            raise _malformed(
                f"the number of graphs to be the same everywhere, at least {self.num_filled} by "
                "the batch vector",
                ", ".join(f"'{name}' = {value}" for name, value in found.items()),
                "An argument of the name num_graphs, batch_size or size is the number of graphs; "
                "rename it if it is something else.",
            )
        return next(iter(found.values()), self.num_filled)

    def _graphs_of_edges(self, slot: int) -> Tensor:
        """Return `[num_edges]` the graph of each edge."""
        name, edge_index = self._call.names[slot], self._call.leaves[slot]
        num_nodes = self.graph_of_node.numel()
        if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.is_floating_point():
            raise _malformed(
                f"'{name}' to hold integers in shape [2, num_edges]",
                f"{edge_index.dtype} of shape {list(edge_index.shape)}",
                "Row 0 holds the sources of the edges, row 1 their targets.",
            )
        if edge_index.numel():
            low, high = (int(end) for end in edge_index.aminmax())
            if low < 0 or high >= num_nodes:
                raise _malformed(
                    f"'{name}' to name nodes 0 to {num_nodes - 1}",
                    f"{low} to {high}",
                    "Count the nodes of all graphs before, as torch_geometric.data.Batch does.",
                )
        source, target = self.graph_of_node[edge_index]
        if not torch.equal(source, target):
            raise _malformed(
                f"'{name}' to join nodes of the same graph",
                f"{int((source != target).sum())} edges between graphs",
                "Leave 'batch' out if it is all one graph.",
            )
        return target

    def _ends_of(self, graphs: Tensor) -> Tensor:
        counts = torch.bincount(graphs, minlength=self.num_graphs)
        return starts_of(counts.tolist(), graphs.device)

    def _find_ptr(self, leaf: Tensor) -> LeafRows:
        if not torch.equal(leaf, self._starts):
            raise _malformed(
                "'ptr' to say where the nodes of each graph begin, as 'batch' does",
                f"another, of shape {list(leaf.shape)}",
                "Take both from the same torch_geometric.data.Batch.",
            )
        return LeafRows(Kind.PTR)

    def _from_slices(self, slot: int, starts: Tensor, dim: int) -> LeafRows:
        """Return how a leaf that PyG concatenated is split."""
        name, raised = self._call.names[slot], self._call.slices[slot].raised
        counts = None
        if raised is not None:
            if raised.dim() != 1:
                raise _malformed(
                    f"'{name}' to hold numbers that are raised by one count a graph",
                    f"'__inc__' of shape {list(raised.shape[1:])}",
                    "Leave it out of the batch (exclude_keys), or split it in two.",
                )
            raised = raised.to(starts.device)
            counts = self._counts_of(raised, self._call.leaves[slot])
        matches = [i for i, other in enumerate(self._set_starts) if torch.equal(other, starts)]
        is_edge_name = self._edges.is_edge_name(name)
        if torch.equal(starts, self._starts) and not (matches and is_edge_name):
            return LeafRows(Kind.NODE, 0, dim, raised, counts)
        if bool((starts.diff() == 1).all()):
            return LeafRows(Kind.GRAPH, 0, dim, raised, counts)
        if not matches:
            graph = torch.arange(self.num_graphs, device=starts.device)
            self.row_sets.append(graph.repeat_interleave(starts.diff()))
            self._set_starts.append(starts)
            matches = [len(self.row_sets) - 1]
        return LeafRows(Kind.EDGE, matches[0], dim, raised, counts)

    def _counts_of(self, raised: Tensor, leaf: Tensor) -> Tensor:
        """Return each graph's own increment; PyG stores their running sums, `raised`."""
        if torch.equal(raised, self._starts[:-1]):
            return self._starts.diff()
        # PyG stores no end of the last graph.
        behind = leaf.max() + 1 if leaf.numel() else raised[-1]
        ends = torch.cat([raised[1:], torch.maximum(behind, raised[-1]).view(1)])
        return ends - raised

    def _by_size(self, name: str, rows: int) -> tuple[Kind, int]:
        """Return what the rows of a bare tensor are, and their edge set."""
        num_nodes, last = self.graph_of_node.numel(), name.rsplit(".", 1)[-1]
        if self._edges.slots and self._edges.is_edge_name(name):
            if rows not in self._edges.sizes:
                wanted = " or ".join(map(str, self._edges.sizes))
                raise _malformed(
                    f"'{name}' to have one row for each of the {wanted} edges",
                    f"{rows} rows",
                    "Pass edge features in the order of 'edge_index'.",
                )
            return Kind.EDGE, self._edges.owner(name, rows)
        kinds = []
        if rows == num_nodes:
            kinds.append(Kind.NODE)
        if rows == self.num_graphs and set(self.sizes) != {1}:
            kinds.append(Kind.GRAPH)
        if rows in self._edges.sizes:
            kinds.append(Kind.EDGE)
        told = self._known.get(name)
        for kind, names in ((Kind.NODE, _OF_NODES), (Kind.GRAPH, _OF_GRAPHS)):
            told = (kind, 0) if last in names else told
        if told == (Kind.WHOLE, rows):
            return Kind.WHOLE, 0
        if len(kinds) < 2:
            kind = kinds[0] if kinds else Kind.WHOLE
            number = self._edges.owner(name, rows) if kind is Kind.EDGE else 0
            if set(self.sizes) != {1}:  # else node rows and graph rows look the same
                self._known[name] = kind, number if kinds else rows
            return kind, number
        if told is not None and told[0] in kinds:
            return told
        raise _malformed(
            f"the number of rows of '{name}' to tell what they are",
            f"{rows} rows, as many as there are "
            + " and ".join(f"{kind.value}s" for kind in kinds),
            "Pass the torch_geometric.data.Batch itself, which says so; or name tensors of edges "
            "'edge_...', of nodes 'x', of graphs 'u'.",
        )


def _malformed(expected: str, found: str, remedy: str) -> GraphError:
    return GraphError(explain(expected=expected, found=found, remedy=remedy))
