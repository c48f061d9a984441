"""Classify the arguments of a call with a batch of graphs, and find the graph of each row.

The batch is a batch vector (`batch`: the graph of each node) or a PyG `Batch`. A `Batch` records
how it concatenated each attribute. Other tensors are classified by name and number of rows;
ambiguous ones raise an error, unless an earlier batch was unambiguous.

To find out what the dimensions of traced values count, a few graphs are drawn. They keep all their
nodes, since models with a fixed number of nodes per graph reshape `[num_graphs * num_nodes,
channels]`. The same graph may be taken several times.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, MutableMapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls.call import COUNTS, Call, last_name
from lightning_gnnpipe.calls.graph_batch import GraphBatch, GraphRows, Kind, LeafRows, starts_of
from lightning_gnnpipe.calls.kinds import (
    EdgeSets,
    Inputs,
    check_node_types,
    classify_graph,
    find_edge_sets,
)
from lightning_gnnpipe.errors import GraphError
from lightning_gnnpipe.graph import check_edges

_OF_NODES = ("x", "pos", "z", "nodes")
_OF_GRAPHS = ("y", "u")
_MAX_GRAPHS = 24  # of a sample
_MAX_DROPPED = 4  # edges of a graph
_MOST_FORMS = 32
Drawn = tuple[tuple[Tensor, ...], GraphBatch]


class KnownKinds(dict[str, tuple[Kind, int]]):
    """What earlier batches have shown of tensors, by name; and of calls on one graph, by form."""

    def __init__(self) -> None:
        super().__init__()
        self._forms: dict[Hashable, Inputs] = {}

    def find_graphs(self, call: Call, graph_of_node: Tensor | None) -> tuple[Call, Inputs]:
        """Classify `call`, with `graph_of_node` as its batch vector if it fits; return both.

        `graph_of_node`: `[num_nodes]` the batch vector of the user's batch. It is used if the call
        has none, the numbers of nodes are equal, and no edge joins two graphs.
        """
        inputs = classify(call, self) if call.has_graphs else self._of_one_graph(call)
        if call.has_graphs or graph_of_node is None or len(graph_of_node) != inputs.num_nodes:
            return call, inputs
        # Forward does not receive this leaf; it only defines the graphs of micro-batches.
        names, leaves = (*call.names, "batch"), (*call.leaves, graph_of_node)
        with_graphs = replace(call, names=names, leaves=leaves)
        try:
            return with_graphs, classify(with_graphs, self)
        except GraphError:  # edges join graphs: treat them as one graph
            return call, inputs

    def _of_one_graph(self, call: Call) -> Inputs:
        """Classify a call on one graph: names and shapes tell all."""
        form = call.signature, call.num_nodes, tuple([(t.shape, t.dtype) for t in call.leaves])
        alike = self._forms.get(form)
        if alike is not None:
            slots = [i for i, kind in enumerate(alike.kinds) if kind is Kind.EDGE_INDEX]
            return replace(alike, edge_index=call.join(slots))
        inputs = classify(call)
        if Kind.NODE in inputs.kinds:  # else the batch was counted
            if len(self._forms) >= _MOST_FORMS:
                del self._forms[next(iter(self._forms))]
            self._forms[form] = replace(inputs, edge_index=inputs.edge_index.new_empty((2, 0)))
        return inputs


def classify(call: Call, known: MutableMapping[str, tuple[Kind, int]] | None = None) -> Inputs:
    """Find out for each tensor of `call` what its rows are, in one graph or a batch of graphs.

    `known`: kinds found in earlier batches, by name; updated in place. Raises GraphError and
    UnsupportedError for malformed or ambiguous arguments.
    """
    check_node_types(call)
    if not call.has_graphs:
        return classify_graph(call)
    edges = find_edge_sets(call, needs_edges=False)
    finder = _Finder(call, edges, {} if known is None else known)
    leaves = tuple(finder.find(slot) for slot in range(len(call.leaves)))
    num_graphs, of_node, sets = finder.num_graphs, finder.graph_of_node, tuple(finder.row_sets)
    graphs = GraphBatch(num_graphs, finder.num_filled, finder.sizes, of_node, sets, leaves)
    kinds = tuple(
        Kind.EDGE_INDEX if slot in edges.slots else rows.kind for slot, rows in enumerate(leaves)
    )
    none = torch.empty((2, 0), dtype=torch.int64, device=of_node.device)
    numbers, sizes = tuple(rows.number for rows in leaves), tuple(map(len, sets))
    return Inputs(kinds, len(of_node), none, sizes, numbers, graphs)


class _Finder:
    """Finds the graph of each row of a call with a batch vector; updates `known`."""

    def __init__(
        self, call: Call, edges: EdgeSets, known: MutableMapping[str, tuple[Kind, int]]
    ) -> None:
        self._call, self._edges, self._known = call, edges, known
        self._last_names = [last_name(name) for name in call.names]
        self.graph_of_node = self._find_batch()
        self.num_filled = int(self.graph_of_node[-1]) + 1 if self.graph_of_node.numel() else 0
        self.num_graphs = self._count_graphs()
        counts = torch.bincount(self.graph_of_node, minlength=self.num_graphs)
        self.sizes = tuple(counts.tolist())
        self._starts = starts_of(counts)
        self.row_sets = [self._graphs_of_edges(slot) for slot in edges.slots]
        self._set_starts = [
            starts_of(torch.bincount(graphs, minlength=self.num_graphs)) for graphs in self.row_sets
        ]

    def find(self, slot: int) -> LeafRows:
        name, leaf = self._last_names[slot], self._call.leaves[slot]
        rows = leaf.size(0) if leaf.dim() else -1
        if slot in self._edges.slots:
            number = self._edges.slots.index(slot)
            return LeafRows(Kind.EDGE, number, 1, self._starts[:-1], self._starts.diff())
        if name == "batch":
            numbers = torch.arange(self.num_graphs, device=leaf.device)
            return LeafRows(Kind.NODE, 0, 0, numbers, torch.ones_like(numbers))
        if name == "ptr":
            if not torch.equal(leaf, self._starts):
                raise GraphError(
                    expected="'ptr' and 'batch' to describe the same graphs",
                    found=f"'ptr' of shape {list(leaf.shape)} with other graph sizes",
                    remedy="Take both from the same torch_geometric.data.Batch.",
                )
            return LeafRows(Kind.PTR)
        if leaf.dim() == 0 and name in COUNTS:
            raise GraphError(
                expected=f"'{self._call.names[slot]}', the number of graphs, to be a plain integer",
                found="a tensor",
                remedy=f"Pass int({name}).",
            )
        slices = self._call.slices.get(slot)
        if slices is not None and slices.starts.numel() == self.num_graphs + 1:
            dim = slices.dim % max(leaf.dim(), 1)
            if leaf.dim() and leaf.size(dim) == int(slices.starts[-1]):
                return self._from_slices(slot, slices.starts.to(leaf.device), dim)
        kind, number = self._by_size(self._call.names[slot], rows)
        return LeafRows(kind, number)

    def _find_batch(self) -> Tensor:
        slot = self._last_names.index("batch")
        name, batch = self._call.names[slot], self._call.leaves[slot]
        num_nodes = self._call.num_nodes
        for other, leaf in zip(self._last_names, self._call.leaves, strict=True):
            if other == "x" and num_nodes is None and leaf.dim() == 2:
                num_nodes = leaf.size(0)
        if num_nodes is not None and batch.numel() != num_nodes:
            raise GraphError(
                expected=f"'{name}' to have one entry for each of the {num_nodes} nodes",
                found=f"{batch.numel()} entries",
                remedy="Entry i is the graph number of node i.",
            )
        is_sorted = bool((batch[1:] >= batch[:-1]).all())
        if batch.dtype != torch.int64 or not is_sorted or bool((batch[:1] < 0).any()):
            raise GraphError(
                expected=f"'{name}' to hold graph numbers of type torch.int64, ascending from 0",
                found=f"{batch.dtype}" + ("" if is_sorted else ", not ascending"),
                remedy="Sort the nodes by graph, as torch_geometric.data.Batch does.",
            )
        return batch

    def _count_graphs(self) -> int:
        found = dict(self._call.counts)
        for name, leaf in zip(self._call.names, self._call.leaves, strict=True):
            if last_name(name) == "ptr" and leaf.dim() == 1:
                found[name] = leaf.numel() - 1
        counts = set(found.values())
        if len(counts) > 1 or any(count < self.num_filled for count in counts):
            raise GraphError(
                expected="all arguments to agree on the number of graphs, which is at least "
                f"{self.num_filled} in the batch vector",
                found=", ".join(f"'{name}' = {value}" for name, value in found.items()),
                remedy="An argument named num_graphs, batch_size or size must be the number of "
                "graphs. Rename it if it has another meaning.",
            )
        return next(iter(found.values()), self.num_filled)

    def _graphs_of_edges(self, slot: int) -> Tensor:
        """Return `[num_edges]` the graph of each edge."""
        name, edge_index = self._call.names[slot], self._call.leaves[slot]
        check_edges(edge_index, self.graph_of_node.numel(), name)
        source, target = self.graph_of_node[edge_index]
        if not torch.equal(source, target):
            raise GraphError(
                expected=f"each edge of '{name}' to join two nodes of one graph",
                found=f"{int((source != target).sum())} edges between graphs",
                remedy="If all nodes belong to one graph, leave 'batch' out.",
            )
        return target

    def _from_slices(self, slot: int, starts: Tensor, dim: int) -> LeafRows:
        """Return how a leaf that PyG concatenated is split."""
        name, increments = self._call.names[slot], self._call.slices[slot].increments
        counts = None
        if increments is not None:
            if increments.dim() != 1:
                raise GraphError(
                    expected=f"'__inc__' of '{name}' to return one number",
                    found=f"shape {list(increments.shape[1:])}",
                    remedy="Leave the attribute out of the batch by exclude_keys, or split it into "
                    "two attributes.",
                )
            increments = increments.to(starts.device)
            counts = self._counts_of(increments, self._call.leaves[slot])
        matches = [i for i, other in enumerate(self._set_starts) if torch.equal(other, starts)]
        is_edge_name = self._edges.is_edge_name(name)
        if torch.equal(starts, self._starts) and not (matches and is_edge_name):
            return LeafRows(Kind.NODE, 0, dim, increments, counts)
        if bool((starts.diff() == 1).all()):
            return LeafRows(Kind.GRAPH, 0, dim, increments, counts)
        if not matches:
            graph = torch.arange(self.num_graphs, device=starts.device)
            self.row_sets.append(graph.repeat_interleave(starts.diff()))
            self._set_starts.append(starts)
            matches = [len(self.row_sets) - 1]
        return LeafRows(Kind.EDGE, matches[0], dim, increments, counts)

    def _counts_of(self, increments: Tensor, leaf: Tensor) -> Tensor:
        """Return what each graph adds to the next one's increment."""
        if torch.equal(increments, self._starts[:-1]):
            return self._starts.diff()
        # PyG stores no end of the last graph.
        behind = leaf.max() + 1 if leaf.numel() else increments[-1]
        ends = torch.cat([increments[1:], torch.maximum(behind, increments[-1]).view(1)])
        return ends - increments

    def _by_size(self, name: str, rows: int) -> tuple[Kind, int]:
        """Return what the rows of a bare tensor are, and their edge set."""
        if self._edges.slots and self._edges.is_edge_name(name):
            return Kind.EDGE, self._edges.owner(name, rows)
        kinds = []
        if rows == self.graph_of_node.numel():
            kinds.append(Kind.NODE)
        if rows == self.num_graphs and set(self.sizes) != {1}:
            kinds.append(Kind.GRAPH)
        if rows in self._edges.sizes:
            kinds.append(Kind.EDGE)
        known = self._known.get(name)
        for kind, names in ((Kind.NODE, _OF_NODES), (Kind.GRAPH, _OF_GRAPHS)):
            known = (kind, 0) if last_name(name) in names else known
        if known == (Kind.WHOLE, rows):
            return Kind.WHOLE, 0
        if len(kinds) < 2:
            kind = kinds[0] if kinds else Kind.WHOLE
            number = self._edges.owner(name, rows) if kind is Kind.EDGE else 0
            if set(self.sizes) != {1}:  # else node rows and graph rows look the same
                self._known[name] = kind, number if kinds else rows
            return kind, number
        if known is not None and known[0] in kinds:
            return known
        raise GraphError(
            expected=f"the number of rows of '{name}' to show what the rows are",
            found=f"{rows} rows; the batch has "
            + " and ".join(f"{rows} {kind.value}s" for kind in kinds),
            remedy="Pass the torch_geometric.data.Batch itself. Or use names: 'edge_...' for rows "
            "of edges, 'x' of nodes, 'u' of graphs.",
        )


def draw_graphs(module: nn.Module, call: Call, inputs: Inputs) -> Drawn:
    """Return the leaves and the batch of a few graphs, the largest and middle-sized ones.

    If possible, the numbers of nodes, edges and graphs differ from each other and from the widths
    of `module`'s parameters. Where graphs have as many edges as nodes, the last edges are dropped.
    """
    graphs = inputs.graphs
    assert graphs is not None
    if not any(graphs.sizes):
        raise GraphError(
            expected="at least one graph with nodes in the batch",
            found=f"{graphs.num_graphs} empty graphs",
            remedy="Remove empty graphs, or put a graph with nodes into the first batch.",
        )
    widths = {size for p in module.parameters() for size in p.shape}
    pairs = zip(inputs.kinds, inputs.edge_sets, strict=True)
    edge_sets = {number for kind, number in pairs if kind is Kind.EDGE_INDEX}
    can_drop = edge_sets == set(range(len(graphs.row_sets)))
    for num_dropped in range(_MAX_DROPPED if can_drop else 1):
        for count in range(3, _MAX_GRAPHS):
            drawn = _draw(call, graphs, count, num_dropped)
            if _sizes_are_distinct(drawn[1], widths):
                return drawn
    return _draw(call, graphs, 3, 0)


def _draw(call: Call, graphs: GraphBatch, count: int, num_dropped: int) -> Drawn:
    """Return `count` graphs with nodes, plus empty ones if the batch has any."""
    work = graphs.work()
    filled = [graph for graph, size in enumerate(graphs.sizes) if size]
    filled.sort(key=lambda graph: (work[graph], graph))
    taken = [filled[-1]] + [filled[(len(filled) // 2 + i) % len(filled)] for i in range(count - 1)]
    inner = [graph for graph in range(graphs.num_filled) if not graphs.sizes[graph]]
    if inner and max(graphs.sizes) == 1:  # else there are as many nodes as graphs
        taken[1:1] = inner[:1] * (1 + count % 3)
    num_filled = len(taken)
    num_empty = (1 + count % 3) if graphs.num_filled < graphs.num_graphs else 0
    taken += [graphs.num_graphs - 1] * num_empty
    rows = GraphRows(graphs, taken)
    device = graphs.graph_of_node.device
    numbers = torch.arange(len(taken))
    row_sets, keeps = [], []
    for number in range(len(graphs.row_sets)):
        owner = numbers.repeat_interleave(rows.starts(Kind.EDGE, number).diff())
        keep = max(len(owner) - num_dropped * (number + 1), 0)
        row_sets.append(owner[:keep].to(device))
        keeps.append(keep)
    leaves, hows = [], []
    for leaf, how in zip(call.leaves, graphs.leaves, strict=True):
        part = rows.take(leaf, how, (0, len(taken)))
        if how.kind is Kind.EDGE:
            part = part.narrow(how.dim, 0, keeps[how.number])
        part = part.clone() if part.is_inference() else part
        leaves.append(part.detach().requires_grad_(leaf.requires_grad))
        if how.counts is not None:
            counts = how.counts[torch.tensor(taken, device=how.counts.device)]
            how = replace(how, increments=counts.cumsum(0) - counts, counts=counts)
        hows.append(how)
    sizes = tuple(graphs.sizes[graph] for graph in taken)
    of_node = numbers.repeat_interleave(torch.tensor(sizes)).to(device)
    sample = GraphBatch(len(taken), num_filled, sizes, of_node, tuple(row_sets), tuple(hows))
    return tuple(leaves), sample


def _sizes_are_distinct(sample: GraphBatch, widths: Collection[int]) -> bool:
    """Whether the sizes of `sample` identify what a dimension counts."""
    sizes = [len(sample.graph_of_node), *map(len, sample.row_sets)]
    sizes += [size for size, _ in sample.row_counts]
    return len(set(sizes)) == len(sizes) and not set(sizes) & {2, *widths}  # 2: rows of edge_index
