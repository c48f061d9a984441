"""A batch of graphs: the graph of each row of its tensors.

`GraphRows` takes some of the graphs, in any order, in groups:

    graphs taken    2 0 | 1          two groups, of two graphs and of one
    rows of nodes   5 6 0 1 2 | 3 4  of graphs with nodes 0 1 2, 3 4 and 5 6

A group numbers its nodes and its graphs from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Kind(Enum):
    """What the rows of a tensor are, usually along its first dimension."""

    NODE = "node"
    EDGE = "edge"
    EDGE_INDEX = "edge_index"
    WHOLE = "whole"
    GRAPH = "graph"
    NONEMPTY_PREFIX = "graph, but for the empty ones at the end"
    PTR = "ptr"


@dataclass(frozen=True, slots=True, eq=False)
class LeafRows:
    """How a tensor of a batch is split by graph.

    Attributes:
        number: Index in `GraphBatch.row_sets`, if `kind` is EDGE.
        dim: The dimension of the rows.
        increments: `[num_graphs]` what was added to each graph's values; None for 0.
        counts: `[num_graphs]` how much `increments` grows from each graph to the next.
    """

    kind: Kind
    number: int = 0
    dim: int = 0
    increments: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GraphBatch:
    """A mini-batch of graphs.

    Attributes:
        num_graphs: Graphs, B, with empty ones.
        num_filled: Graphs up to the last one with a node.
        sizes: Number of nodes of each graph.
        graph_of_node: `[num_nodes]` ascending.
        row_sets: `[num_rows]` the graph of each row, for edges and each other set of non-node rows.
        leaves: How each tensor of the call is split.
    """

    num_graphs: int
    num_filled: int
    sizes: tuple[int, ...]
    graph_of_node: Tensor
    row_sets: tuple[Tensor, ...]
    leaves: tuple[LeafRows, ...]

    @property
    def form(self) -> tuple[bool, bool]:
        """Whether each graph up to `num_filled` has one node, and whether empty graphs follow."""
        is_single = all(size == 1 for size in self.sizes[: self.num_filled])
        return is_single, self.num_filled < self.num_graphs

    @property
    def row_counts(self) -> list[tuple[int, Kind]]:
        """(size, kind) of rows of graphs, without sizes that rows of nodes have too."""
        is_single, has_end = self.form
        counts = [(self.num_graphs, Kind.GRAPH)] if has_end or not is_single else []
        if has_end and not is_single:
            counts.append((self.num_filled, Kind.NONEMPTY_PREFIX))
        return counts

    def work(self) -> list[int]:
        """Return the estimated cost of each graph: its number of rows of any kind."""
        total = torch.tensor(self.sizes)
        for graphs in self.row_sets:
            total = total + torch.bincount(graphs, minlength=self.num_graphs).cpu()
        return [int(one) for one in total.tolist()]


def starts_of(counts: Tensor) -> Tensor:
    """Return `[num_graphs + 1]` the first row of each graph, given its number of rows."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


Span = tuple[int, int]


class GraphRows:
    """Rows of the graphs `taken` from a batch, in order; a graph may be taken several times."""

    def __init__(self, graphs: GraphBatch, taken: Sequence[int]) -> None:
        self._graphs = graphs
        self._taken = torch.tensor(taken, dtype=torch.int64)
        self._is_all = list(taken) == list(range(graphs.num_graphs))
        self._starts: dict[tuple[Kind, int], Tensor] = {}
        # Copies on the batch's device: a copy for each group would wait for the device each time.
        self._taken_there = self._taken.to(graphs.graph_of_node.device)
        self._starts_there: dict[tuple[Kind, int], Tensor] = {}
        self._places: dict[tuple[Kind, int], Tensor] = {}

    def starts(self, kind: Kind, number: int = 0) -> Tensor:
        """Return `[num_taken + 1]` the first row of each taken graph, on the CPU."""
        key = kind, number
        if key not in self._starts:
            self._starts[key] = starts_of(self._per_graph(kind, number)[self._taken])
        return self._starts[key]

    def span(self, kind: Kind, number: int, group: Span) -> Span:
        """Return start and end of a group's rows; `group` is its range of taken graphs."""
        starts = self.starts(kind, number)
        return int(starts[group[0]]), int(starts[group[1]])

    def places(self, kind: Kind, number: int) -> Tensor:
        """Return `[num_rows]` the batch's row at each place."""
        key = kind, number
        if key not in self._places:
            per_graph = self._per_graph(kind, number)
            in_batch = (per_graph.cumsum(0) - per_graph)[self._taken]
            starts = self.starts(kind, number)
            shift = (in_batch - starts[:-1]).repeat_interleave(starts.diff())
            rows = (shift + torch.arange(len(shift))).to(self._graphs.graph_of_node.device)
            if kind is Kind.EDGE:
                order = _order(self._graphs.row_sets[number])
                rows = rows if order is None else order[rows]
            self._places[key] = rows
        return self._places[key]

    def take(self, leaf: Tensor, how: LeafRows, group: Span) -> Tensor:
        """Return a group's part of `leaf`; node and graph numbers start at 0."""
        if how.kind is Kind.WHOLE:
            return leaf
        if how.kind is Kind.PTR:
            starts = self._on_device(Kind.NODE, 0)[group[0] : group[1] + 1]
            return (starts - starts[0]).to(leaf.dtype)
        if self._is_all and group == (0, self._graphs.num_graphs):
            order = _order(self._graphs.row_sets[how.number]) if how.kind is Kind.EDGE else None
            if order is None:
                return leaf
        first, end = self.span(how.kind, how.number, group)
        part = leaf.index_select(how.dim, self.places(how.kind, how.number)[first:end])
        if how.increments is None or how.counts is None:
            return part
        taken = self._taken_there[group[0] : group[1]]
        counts = how.counts[taken]
        shift = counts.cumsum(0) - counts - how.increments[taken]
        rows = self._on_device(how.kind, how.number)[group[0] : group[1] + 1].diff()
        shape = [1] * part.dim()
        shape[how.dim] = -1
        shifts = shift.repeat_interleave(rows, output_size=end - first)
        return part + shifts.view(shape).to(part.dtype)

    def _on_device(self, kind: Kind, number: int) -> Tensor:
        """Return `starts` on the batch's device."""
        key = kind, number
        if key not in self._starts_there:
            self._starts_there[key] = self.starts(kind, number).to(self._taken_there.device)
        return self._starts_there[key]

    def _per_graph(self, kind: Kind, number: int) -> Tensor:
        """Return `[num_graphs]` the rows of each graph of the batch."""
        graphs = self._graphs
        if kind is Kind.NODE:
            return torch.tensor(graphs.sizes, dtype=torch.int64)
        if kind is Kind.EDGE:
            return torch.bincount(graphs.row_sets[number], minlength=graphs.num_graphs).cpu()
        rows = torch.ones(graphs.num_graphs, dtype=torch.int64)
        if kind is Kind.NONEMPTY_PREFIX:
            rows[graphs.num_filled :] = 0
        return rows


def _order(graphs: Tensor) -> Tensor | None:
    """Return the order that sorts rows by graph; None if they are sorted."""
    if bool((graphs[1:] >= graphs[:-1]).all()):
        return None
    return graphs.argsort(stable=True)
