"""Nodes assigned to chunks: none empty, balanced, few edges cut; what shards exchange then."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import edge_cut_frac, measure_split, partition_nodes, shard_plan
from lightning_gnnpipe.graph.partition import _metis, _symmetrize, rebalance, remote_reads
from lightning_gnnpipe.types import PartitionMethod
from tests.graph.strategies import (
    DRAWN_ASSIGNMENT,
    DRAWN_EDGES,
    chunk_weights,
    cut_multigraphs,
    multigraphs,
    power_law,
)

METHODS = [
    pytest.param(name, marks=pytest.mark.skipif(not find_spec("kaminpar"), reason="not installed"))
    if name == "kaminpar"
    else name
    for name in get_args(PartitionMethod)
]
NO_LINKS = torch.empty(2, 0, dtype=torch.int64)


@pytest.mark.parametrize("method", METHODS)
@given(graph=multigraphs(), share=st.floats(0, 1))
@settings(max_examples=150)
def test_no_chunk_is_empty(
    method: PartitionMethod, graph: tuple[Tensor, int], share: float
) -> None:
    edge_index, num_nodes = graph
    num_chunks = 1 + round(share * (num_nodes - 1))
    parts = partition_nodes(edge_index, num_nodes, num_chunks=num_chunks, method=method, seed=0)
    assert parts.shape == (num_nodes,) and parts.dtype == torch.int64
    assert sorted(set(parts.tolist())) == list(range(num_chunks))


@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("num_chunks", [2, 8, 16, 32])
def test_chunks_of_a_power_law_graph_weigh_at_most_5_percent_over_the_mean(
    method: PartitionMethod, num_chunks: int
) -> None:
    edge_index = power_law(20_000, 100_000)
    weights = 1 + torch.bincount(edge_index[1], minlength=20_000)
    assert int(weights.max()) < 1.05 * float(weights.sum()) / num_chunks
    parts = partition_nodes(edge_index, 20_000, num_chunks=num_chunks, method=method, seed=0)
    loads = chunk_weights(edge_index, parts, num_chunks)
    assert float(loads.max()) <= 1.05 * float(loads.mean())


@given(graph=multigraphs())
@settings(max_examples=50)
def test_links_are_each_pair_of_neighbours_once_a_direction(graph: tuple[Tensor, int]) -> None:
    edge_index, num_nodes = graph
    pairs = {(a, b) for a, b in edge_index.t().tolist() if a != b}
    links = _symmetrize(edge_index, num_nodes)
    assert [tuple(one) for one in links.t().tolist()] == sorted(pairs | {(b, a) for a, b in pairs})


def test_stars_that_metis_leaves_out_of_balance_are_split() -> None:
    # 50 stars of 40 leaves each, all pointing at their hub: METIS by itself keeps stars whole.
    hubs = torch.arange(50).repeat_interleave(40)
    edge_index = torch.stack([torch.arange(50, 50 + 2000), hubs])
    weights = 1 + torch.bincount(edge_index[1], minlength=2050)
    alone = _metis(_symmetrize(edge_index, 2050), weights, 16, seed=0)
    loads = chunk_weights(edge_index, alone, 16)
    assert float(loads.max()) > 1.05 * float(loads.mean())
    parts = partition_nodes(edge_index, 2050, num_chunks=16, method="metis", seed=0)
    loads = chunk_weights(edge_index, parts, 16)
    assert float(loads.max()) <= 1.05 * float(loads.mean())
    assert edge_cut_frac(edge_index, parts) < 0.1


def test_a_hub_heavier_than_the_mean_does_not_unbalance_the_others() -> None:
    # 999 leaves -> node 0, and a ring over all: node 0 alone weighs a third of everything.
    leaves, ring = torch.arange(1, 1000), torch.arange(1000)
    star = torch.stack([leaves, torch.zeros_like(leaves)])
    edge_index = torch.cat([star, torch.stack([ring, ring.roll(1)])], dim=1)
    parts = partition_nodes(edge_index, 1000, num_chunks=8, method="metis", seed=0)
    loads = chunk_weights(edge_index, parts, 8)
    assert float(loads.max()) == 1001  # The hub's own weight: no partition does better.


def test_nodes_of_middling_weight_are_packed_within_the_bound() -> None:
    # Weights 6 6 6 6 | 4 4 4 4 in two chunks: swapping is needed, moving one node is not enough.
    weights = torch.tensor([6, 6, 6, 6, 4, 4, 4, 4])
    parts = rebalance(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), weights, NO_LINKS, 2)
    assert torch.bincount(parts, weights.double()).tolist() == [20.0, 20.0]
    assert rebalance(parts, weights, NO_LINKS, 2).equal(parts)  # balanced ones stay


def test_rebalancing_moves_the_nodes_that_cut_least() -> None:
    # Two chains, 0 - 1 - ... - 59 in chunk 0 and 60 - ... - 99 in chunk 1, joined by 59 - 60: the
    # cheapest way to move about ten nodes is to move the cut along the chain.
    chain = torch.stack([torch.arange(99), torch.arange(1, 100)])
    links = torch.cat([chain, chain.flip(0)], dim=1)
    parts = (torch.arange(100) >= 60).long()
    balanced = rebalance(parts, torch.ones(100).long(), links, 2)
    assert int(torch.bincount(balanced).max()) <= 52
    assert edge_cut_frac(chain, balanced) <= 4 / 99


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_partition(method: PartitionMethod) -> None:
    edges = power_law(2000, 10_000)
    first, again, other = (
        partition_nodes(edges, 2000, num_chunks=8, method=method, seed=seed) for seed in (3, 3, 4)
    )
    assert first.equal(again)
    assert method != "contiguous" or first.equal(first.sort().values)
    assert method != "random" or not first.equal(other)


def test_a_given_partition_is_taken_as_it_is() -> None:
    given_parts = torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32)
    parts = partition_nodes(DRAWN_EDGES, 5, num_chunks=2, method=given_parts, seed=0)
    assert parts.dtype == torch.int64 and parts.tolist() == given_parts.tolist()


@given(
    weights=st.lists(st.integers(1, 9), min_size=60, max_size=200),
    num_chunks=st.integers(2, 4),
    seed=st.integers(0, 99),
)
@example(weights=[9] * 61, num_chunks=3, seed=0)
@settings(max_examples=150)
def test_light_nodes_are_always_brought_within_the_bound(
    weights: list[int], num_chunks: int, seed: int
) -> None:
    weight = torch.tensor(weights)
    mean = float(weight.sum()) / num_chunks
    generator = torch.Generator().manual_seed(seed)
    skew = torch.rand(len(weights), generator=generator) ** 4
    parts = rebalance((skew * num_chunks).long(), weight, NO_LINKS, num_chunks)
    bound = 1.05 * mean if int(weight.max()) <= 0.05 * mean else mean + int(weight.max())
    assert float(torch.bincount(parts, weight.double()).max()) <= bound


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


def test_a_missing_partitioner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaminpar", None)
    with pytest.raises(ConfigError, match=r"'kaminpar' .*pip install kaminpar"):
        partition_nodes(DRAWN_EDGES, 5, num_chunks=2, method="kaminpar")
