from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, GraphError
from lightning_gnnpipe.graph import check_graph, check_num_chunks, partition_nodes
from lightning_gnnpipe.types import Partition
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
        (DRAWN_EDGES + 3, r"from 0 to 4 \(got node 6\)\. .*features have 5 rows"),
    ],
)
def test_a_malformed_edge_index_is_refused(edge_index: Tensor, text: str) -> None:
    with pytest.raises(GraphError, match=text):
        check_graph(edge_index, 5)


def test_an_edge_index_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(GraphError, match=r"'edge_index' to be a torch\.Tensor \(got list\)"):
        check_graph([[0], [0]], 1)  # type: ignore[arg-type]


def test_a_graph_without_nodes_is_refused() -> None:
    with pytest.raises(GraphError, match=r"at least one node \(got 0\)"):
        check_graph(torch.empty(2, 0, dtype=torch.int64), 0)


@pytest.mark.parametrize("num_chunks", [2.0, True, "2"])
def test_a_number_of_chunks_that_is_no_integer_is_refused(num_chunks: int) -> None:
    with pytest.raises(ConfigError, match=r"Expected 'num_chunks' to be an integer \(got "):
        check_num_chunks(num_chunks, 5)


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


def test_an_unknown_method_is_refused() -> None:
    method: Partition = "louvain"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Expected 'partition' to be .*'metis'.*got 'louvain'"):
        partition_nodes(DRAWN_EDGES, 5, num_chunks=2, method=method, seed=0)
