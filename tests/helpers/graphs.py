"""Tiny float64 graphs, drawn in comments, each with an assignment of its nodes to chunks.

Nothing here is random: features, labels and weights are formulas of the node or edge number, so a
failing test shows the same numbers everywhere. An arrow ``a -> b`` is an edge with source ``a`` and
target ``b``; ``|`` in a drawing is where one chunk ends and the next begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

NUM_FEATURES = 5
NUM_EDGE_FEATURES = 3
NUM_CLASSES = 3

Edges = list[tuple[int, int]]


@dataclass(frozen=True)
class GraphCase:
    """One graph and the chunk of each of its nodes, ``[num_nodes]``."""

    name: str
    data: Data
    partition: Tensor

    @property
    def num_chunks(self) -> int:
        return int(self.partition.max()) + 1


def all_cases() -> list[GraphCase]:
    """Return every small case, for ``pytest.mark.parametrize(..., ids=name_of)``."""
    ring_of_5 = [(3 + source, 3 + target) for source, target in _ring(5)]
    forks = [(0, 2), (1, 3), (2, 3), (2, 4), (4, 2)]
    return [
        #   0 -> 1 -> 2 | -> 3 -> 4 -> 5 -> 0     a ring in one direction, chords 1 -> 4, 5 -> 2
        case_of("directed", [*_ring(6), (1, 4), (5, 2)], [0, 0, 0, 1, 1, 1]),
        #   0 - 1 | 2 - 3 | 4 - 5 - 0             a ring in both directions, and the chord 1 - 4
        case_of("undirected", _both([*_ring(6), (1, 4)]), [0, 0, 1, 1, 2, 2]),
        #   0 - 1   2 | 3 - 4   5 | 1 - 3, 4 - 0  nodes 2 and 5 have no edge at all
        case_of("isolated_nodes", _both([(0, 1), (3, 4), (1, 3), (4, 0)]), [0, 0, 0, 1, 1, 1]),
        #   0 -> 1 -> 2 | -> 3 -> 4 -> 0          and the loops 1 -> 1 and 3 -> 3 (but no others)
        case_of("self_loops", [*_ring(5), (1, 1), (3, 3), (2, 0)], [0, 0, 0, 1, 1]),
        #   0 => 1 -> 2 | => 3 -> 4 -> 0          0 -> 1 twice, 2 -> 3 three times
        case_of("multi_edges", [*_ring(5), (0, 1), (2, 3), (2, 3), (4, 2)], [0, 0, 0, 1, 1]),
        #   0 - 1 - 2 | 3 - 4 - 5 | 6 - 7 - 0     a ring in both directions and 2 - 6; every edge
        #                                         has its own features and weight
        case_of("edge_features", _both([*_ring(8), (2, 6)]), [0, 0, 0, 1, 1, 1, 2, 2]),
        #   0 | 1 - 2 | 3 - 4 - 5 - 6 - 7 - 8 - 0   1, 2 and 6 nodes, and the chords 0 - 4, 2 - 7
        case_of("unequal_chunks", _both([*_ring(9), (0, 4), (2, 7)]), [0, 1, 1, 2, 2, 2, 2, 2, 2]),
        #   0 - 1 - 2 | 3 - 4 - 5 | 6 - 7 - 3     chunk 0 is a component of its own: reads nobody
        case_of("empty_halo", _both([(0, 1), (1, 2), *ring_of_5]), [0, 0, 0, 1, 1, 1, 2, 2]),
        #   0 -> 2 | 1 -> 3 <- 2 -> 4 -> 2        chunk 0 = {0, 1}: only sources, no edge ends
        #                                         there; chunk 2 = {5}: no edge at all
        case_of("chunk_without_edges", forks, [0, 0, 1, 1, 1, 2]),
    ]


def communities(num_chunks: int, num_nodes: int = 24) -> GraphCase:
    """A graph of middle size for any number of chunks up to ``num_nodes``; chunks are unequal.

    A ring in both directions, and from every node two long directed chords::

        n - n+1,    n -> 7n + 3,    n -> 5n + 11     (modulo num_nodes)

    The first nodes go to one chunk each, the others to chunk ``n * n mod num_chunks``: no chunk is
    empty, and nearly every chunk reads rows of nearly every other.
    """
    chords = [(n, (7 * n + 3) % num_nodes) for n in range(num_nodes)]
    chords += [(n, (5 * n + 11) % num_nodes) for n in range(num_nodes)]
    partition = [n if n < num_chunks else (n * n) % num_chunks for n in range(num_nodes)]
    return case_of(f"communities_{num_chunks}", [*_both(_ring(num_nodes)), *chords], partition)


def _ring(num_nodes: int) -> Edges:
    return [(n, (n + 1) % num_nodes) for n in range(num_nodes)]


def _both(edges: Edges) -> Edges:
    return edges + [(target, source) for source, target in edges]


def case_of(name: str, edges: Edges, partition: list[int]) -> GraphCase:
    num_nodes, num_edges = len(partition), len(edges)
    node = torch.arange(num_nodes)
    data = Data(
        x=_table(num_nodes, NUM_FEATURES, phase=0.3),
        y=(3 * node + node // 2) % NUM_CLASSES,
        edge_index=torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous(),
        edge_attr=_table(num_edges, NUM_EDGE_FEATURES, phase=1.7),
        edge_weight=1.0 + 0.5 * _table(num_edges, 1, phase=0.9).squeeze(1),
        train_mask=node % 4 != 3,
        val_mask=node % 4 == 3,
        test_mask=node % 4 == 2,
    )
    return GraphCase(name, data, torch.tensor(partition))


def _table(num_rows: int, num_columns: int, *, phase: float) -> Tensor:
    """Return ``[num_rows, num_columns]`` numbers in [-1, 1] without a pattern."""
    number = torch.arange(num_rows * num_columns, dtype=torch.float64)
    return torch.sin(phase + 2.3 * number + 0.17 * number**2).view(num_rows, num_columns)
