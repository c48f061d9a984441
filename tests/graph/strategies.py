"""Random directed multigraphs, and graphs drawn by hand, for the tests of `graph`."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

# 0 -> 1 -> 2 -> 3 -> 0 (a ring), 0 -> 2 twice, 3 -> 3 (a loop), 4 is isolated.
#
#   chunk 0 = nodes 0, 2, 4       chunk 1 = nodes 1, 3
#   positions: 0 1 2 | 3 4   hold nodes: 0 2 4 | 1 3
DRAWN_EDGES = torch.tensor([[0, 1, 2, 3, 0, 0, 3], [1, 2, 3, 0, 2, 2, 3]])
DRAWN_ASSIGNMENT = torch.tensor([0, 1, 0, 1, 0])


@st.composite
def multigraphs(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw `edge_index` and `num_nodes`: self-loops, multi-edges and isolated nodes occur."""
    num_nodes = draw(st.integers(1, 14))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=50))
    return torch.tensor(edges, dtype=torch.int64).view(-1, 2).t(), num_nodes


@st.composite
def cut_multigraphs(draw: st.DrawFn) -> tuple[Tensor, int, Tensor]:
    """Draw a multigraph and the chunk of each node, no chunk empty."""
    edge_index, num_nodes = draw(multigraphs())
    num_chunks = draw(st.integers(1, num_nodes))
    free = st.integers(0, num_chunks - 1)
    rest = draw(st.lists(free, min_size=num_nodes - num_chunks, max_size=num_nodes - num_chunks))
    assignment = draw(st.permutations([*range(num_chunks), *rest]))
    return edge_index, num_nodes, torch.tensor(assignment)


def power_law(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    """Return `[2, num_edges]`: targets by a power law (few hubs), sources uniform."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(num_edges, generator=generator) ** 3 * num_nodes).long()
    source = torch.randint(num_nodes, (num_edges,), generator=generator)
    return torch.stack([source, target])


def chunk_weights(edge_index: Tensor, assignment: Tensor, num_chunks: int) -> Tensor:
    """Return `[num_chunks]` rows plus in-edges of each chunk."""
    weights = 1 + torch.bincount(edge_index[1], minlength=assignment.numel())
    return torch.bincount(assignment, weights.double(), minlength=num_chunks)
