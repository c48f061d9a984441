from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.errors import GraphError
from lightning_gnnpipe.graph import check_graph, partition_nodes
from tests.graph.strategies import DRAWN_EDGES


def test_a_sound_graph_passes() -> None:
    check_graph(DRAWN_EDGES, 5)
    check_graph(DRAWN_EDGES.int(), 5)
    check_graph(torch.empty(2, 0, dtype=torch.int64), 1)


@pytest.mark.parametrize(
    ("edge_index", "text"),
    [
        (DRAWN_EDGES.float(), r"hold integers \(got torch\.float32\)\. .*\.long\(\)"),
        (DRAWN_EDGES.t(), r"shape \[2, num_edges\] \(got \[7, 2\]\)"),
        (torch.zeros(4, dtype=torch.int64), r"shape \[2, num_edges\] \(got \[4\]\)"),
        (DRAWN_EDGES - 1, r"from 0 to 4 \(got node -1\)"),
        (DRAWN_EDGES + 3, r"from 0 to 4 \(got node 6\)\. .*graph has 5 nodes"),
    ],
)
def test_a_malformed_edge_index_is_refused(edge_index: Tensor, text: str) -> None:
    with pytest.raises(GraphError, match=text):
        check_graph(edge_index, 5)


def test_a_graph_without_nodes_is_refused() -> None:
    with pytest.raises(GraphError, match=r"at least one node \(got 0\)"):
        check_graph(torch.empty(2, 0, dtype=torch.int64), 0)


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        (torch.zeros(4, dtype=torch.int64), r"shape \[5\] \(got torch\.int64 of shape \[4\]\)"),
        (torch.zeros(5), r"integer tensor .* \(got torch\.float32"),
        (torch.tensor([0, 1, 2, 1, 0]), r"chunks from 0 to 1 \(got chunk 2\)"),
        (torch.tensor([0, 1, -1, 1, 0]), r"chunks from 0 to 1 \(got chunk -1\)"),
        (torch.tensor([1, 1, 1, 1, 1]), r"\(got chunk 0 has none\)"),
    ],
)
def test_a_malformed_given_partition_is_refused(assignment: Tensor, text: str) -> None:
    with pytest.raises(GraphError, match=text):
        partition_nodes(DRAWN_EDGES, 5, num_chunks=2, method=assignment, seed=0)
