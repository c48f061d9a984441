"""What is known of a batch of graphs: which graph each row of its tensors belongs to.

graph_of_node   0 0 0 1 1 3      three nodes of graph 0, two of graph 1, one of graph 3;
num_graphs      5                graphs 2 and 4 have none,
num_filled      4                and graph 4 is behind the last that has: what counts graphs by
                                 the batch vector alone does not see it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Kind(Enum):
    """What the rows of a tensor are: those of a dimension, usually the first."""

    NODE = "node"
    EDGE = "edge"
    EDGE_INDEX = "edge_index"
    WHOLE = "whole"
    GRAPH = "graph"
    FILLED = "graph, but for the empty ones at the end"
    PTR = "ptr"


@dataclass(frozen=True, slots=True, eq=False)
class LeafRows:
    """How a tensor of a batch is cut by graph.

    Attributes:
        kind: What its rows are.
        number: Of which row set, where `kind` is EDGE.
        dim: The dimension that they are rows in.
        raised: `[num_graphs]` what was added to the numbers in it, for each graph; None for
            nothing. Node numbers, as in `edge_index`, count the nodes of all graphs before.
        counts: `[num_graphs]` by how much each graph raises the numbers of those behind it.
    """

    kind: Kind
    number: int = 0
    dim: int = 0
    raised: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GraphBatch:
    """A mini-batch of graphs.

    Attributes:
        num_graphs: Graphs, B, with those that have no node.
        num_filled: Graphs up to the last one with a node.
        sizes: For each graph its number of nodes.
        graph_of_node: `[num_nodes]` ascending.
        row_sets: For each set of rows that are no nodes `[num_rows]` the graph of each: edges, and
            what else there are several of in a graph.
        leaves: For each tensor of the call how it is cut.
    """

    num_graphs: int
    num_filled: int
    sizes: tuple[int, ...]
    graph_of_node: Tensor
    row_sets: tuple[Tensor, ...]
    leaves: tuple[LeafRows, ...]

    @property
    def num_with_nodes(self) -> int:
        """Graphs that have a node."""
        return sum(size > 0 for size in self.sizes)

    @property
    def form(self) -> tuple[bool, bool]:
        """Whether each graph, but for empty ones at the end, has one node; whether there are such.

        Rows of nodes are then rows of graphs, and those of graphs with nodes are fewer.
        """
        is_single = all(size == 1 for size in self.sizes[: self.num_filled])
        return is_single, self.num_filled < self.num_graphs

    @property
    def row_counts(self) -> list[tuple[int, Kind]]:
        """How many rows of graphs there are, of which kind, but for those that nodes have too."""
        is_single, has_end = self.form
        counts = [(self.num_graphs, Kind.GRAPH)] if has_end or not is_single else []
        if has_end and not is_single:
            counts.append((self.num_filled, Kind.FILLED))
        return counts

    def work(self) -> list[int]:
        """Return for each graph what its time is taken to be proportional to: all its rows."""
        total = torch.tensor(self.sizes)
        for graphs in self.row_sets:
            total = total + torch.bincount(graphs, minlength=self.num_graphs).cpu()
        return [int(one) for one in total.tolist()]


def starts_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return where the rows of each graph begin, `[num_graphs + 1]`."""
    total = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(sizes, dtype=torch.int64), 0, out=total[1:])
    return total.to(device)
