from __future__ import annotations

import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_gnnpipe.graph import edge_cut_frac, measure_split, shard_plan
from lightning_gnnpipe.graph.partition import remote_reads
from tests.graph.strategies import DRAWN_ASSIGNMENT, DRAWN_EDGES, cut_multigraphs


def test_the_drawn_graph_cuts_four_of_seven_edges() -> None:
    # Cut: 0->1, 1->2, 2->3, 3->0. Kept: 0->2 twice and the loop 3->3.
    assert edge_cut_frac(DRAWN_EDGES, DRAWN_ASSIGNMENT) == 4 / 7
    assert edge_cut_frac(torch.empty(2, 0, dtype=torch.int64), DRAWN_ASSIGNMENT) == 0.0


@given(cut_multigraphs())
@settings(max_examples=100)
def test_remote_reads_are_each_remote_source_once_a_shard(
    graph: tuple[Tensor, int, Tensor],
) -> None:
    edge_index, _, assignment = graph
    owner = assignment.tolist()
    pairs = {(owner[t], s) for s, t in edge_index.t().tolist() if owner[t] != owner[s]}
    readers, sources = remote_reads(edge_index, assignment)
    assert list(zip(readers.tolist(), sources.tolist(), strict=True)) == sorted(pairs)


@given(cut_multigraphs())
@settings(max_examples=50)
def test_the_sizes_of_pieces_are_those_of_the_shards_plans(
    graph: tuple[Tensor, int, Tensor],
) -> None:
    """Whatever the chunks are: here they lie across the shards."""
    edge_index, num_nodes, shards = graph
    num_shards = int(shards.max()) + 1
    chunks = torch.arange(num_nodes) % min(2, num_nodes)
    sizes = measure_split(edge_index, chunks, shards, num_shards)
    assert sizes.received.sum() == sizes.sent.sum()
    assert sizes.received.sum() == remote_reads(edge_index, shards)[0].numel()
    for index in range(num_shards):
        plan = shard_plan(edge_index, chunks, shards, index=index, num_shards=num_shards)
        for chunk in plan.chunks:
            own = chunk.index, index
            assert sizes.nodes[own] == chunk.num_nodes
            assert sizes.edges[own] == chunk.edge_end - chunk.edge_start
            assert sizes.sent[own] == sum(peer.send.numel() for peer in chunk.peers)
            assert sizes.received[own] == sum(peer.receive.numel() for peer in chunk.peers)
            readers = sum(peer.send.numel() > 0 for peer in chunk.peers)
            read = sum(peer.receive.numel() > 0 for peer in chunk.peers)
            assert sizes.peers[own] == max(readers, read)
