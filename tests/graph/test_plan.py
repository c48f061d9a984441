"""Chunks of a graph, micro-batches of graphs with about the same work, and their order."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, GraphError
from lightning_gnnpipe.graph import (
    Chunk,
    ChunkPlan,
    check_graph,
    chunk_order,
    cut_in_turn,
    partition_nodes,
    plan_from_assignment,
    plan_micro_batches,
)
from lightning_gnnpipe.graph import plan as plans
from tests.graph.strategies import DRAWN_ASSIGNMENT, DRAWN_EDGES, cut_multigraphs


def _edges_of(plan: ChunkPlan, chunk: Chunk) -> Tensor:
    """Return the chunk's edges in the user's numbers, by way of local numbers and positions."""
    positions = torch.cat([torch.arange(chunk.start, chunk.end), chunk.halo])
    return plan.perm[positions[chunk.edge_index]]


@given(cut_multigraphs())
@settings(max_examples=200)
def test_any_plan_is_the_graph_by_brute_force(graph: tuple[Tensor, int, Tensor]) -> None:
    """Chunks tile nodes and sorted edges, which are those given; halos are the outside sources."""
    edge_index, num_nodes, assignment = graph
    plan = plan_from_assignment(edge_index, num_nodes, assignment)
    assert sorted(plan.perm.tolist()) == list(range(num_nodes))
    assert sorted(plan.edge_perm.tolist()) == list(range(edge_index.size(1)))
    back = torch.cat([_edges_of(plan, chunk) for chunk in plan.chunks], dim=1)
    assert torch.equal(back, edge_index[:, plan.edge_perm])
    assert torch.equal(_edges_of(plan.whole, plan.whole.chunks[0]), back)
    owner, pairs = assignment.tolist(), edge_index.t().tolist()
    place = {node: position for position, node in enumerate(plan.perm.tolist())}
    assert plan.chunk_of_position().tolist() == [owner[node] for node in plan.perm.tolist()]
    node, edge = 0, 0
    for index, chunk in enumerate(plan.chunks):
        assert (chunk.index, chunk.start, chunk.edge_start) == (index, node, edge)
        nodes = plan.perm[chunk.start : chunk.end].tolist()
        assert nodes == (assignment == index).nonzero().flatten().tolist()
        targets = chunk.edge_index[1]
        assert torch.equal(targets, targets.sort().values)
        assert not targets.numel() or int(targets.max()) < chunk.num_nodes
        node, edge = chunk.end, chunk.edge_end
        outside = {s for s, t in pairs if owner[t] == chunk.index != owner[s]}
        assert chunk.halo.tolist() == sorted(place[node] for node in outside)
        owners = [owner[node] for node in outside]
        counts = {c: owners.count(c) for c in sorted(set(owners))}
        assert dict(zip(chunk.halo_chunks, chunk.halo_counts, strict=True)) == counts
        assert chunk.halo_chunks == tuple(counts)
    assert (node, edge) == (num_nodes, edge_index.size(1))


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
@pytest.mark.parametrize("held", [1, 7, 1 << 24])
def test_chunks_that_are_cut_in_turn_are_those_of_the_plan(
    block: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_BLOCK", block)
    monkeypatch.setattr(plans, "_HELD", held)

    @given(cut_multigraphs())
    @settings(max_examples=60)
    def compare(graph: tuple[Tensor, int, Tensor]) -> None:
        edge_index, num_nodes, assignment = graph
        whole = plan_from_assignment(edge_index, num_nodes, assignment)
        nodes, found = cut_in_turn(edge_index.int(), assignment)
        cut = list(found)
        assert torch.equal(nodes, whole.perm)
        assert torch.equal(torch.cat([one.slots for one in cut]), whole.edge_perm)
        edges = torch.cat([one.edges for one in cut], dim=1)
        assert torch.equal(edges, whole.whole.chunks[0].edge_index)
        for (chunk, _, _), expected in zip(cut, whole.chunks, strict=True):
            for name in Chunk.__dataclass_fields__.keys() - {"is_whole"}:
                one, other = getattr(chunk, name), getattr(expected, name)
                assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, name

    compare()


def test_whole_keeps_the_positions_and_all_tensors_move() -> None:
    plan = plan_from_assignment(DRAWN_EDGES, 5, DRAWN_ASSIGNMENT)
    assert plan.whole is plan.whole and plan.whole.whole is plan.whole
    assert (plan.whole.num_chunks, plan.whole.chunks[0].num_halo) == (1, 0)
    assert torch.equal(plan.whole.perm, plan.perm)
    assert torch.equal(plan.whole.edge_perm, plan.edge_perm)
    moved = plan.to("meta")
    tensors = [moved.perm, moved.edge_perm, moved.chunk_of_position()]
    for chunk in (*moved.chunks, *moved.whole.chunks):
        tensors += [chunk.halo, chunk.edge_index]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_int32_edges_give_a_plan_in_int64_and_edges_of_one_target_keep_their_order() -> None:
    plan = plan_from_assignment(DRAWN_EDGES.int(), 5, DRAWN_ASSIGNMENT.int())
    assert plan.edge_perm.tolist() == [3, 1, 4, 5, 0, 2, 6]
    assert plan.perm.dtype == plan.chunks[0].edge_index.dtype == torch.int64


@pytest.mark.parametrize("num_chunks", [0, -1, 6])
def test_number_of_chunks_out_of_range_is_refused(num_chunks: int) -> None:
    text = r"Expected 'num_chunks' to be between 1 and the number of nodes"
    with pytest.raises(ConfigError, match=rf"{text}.*got {num_chunks}"):
        partition_nodes(DRAWN_EDGES, 5, num_chunks=num_chunks, method="metis")


EMPTY = torch.empty(2, 0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "text"),
    [
        (DRAWN_EDGES.float(), 5, r"hold integers \(got torch\.float32\)\. .*\.long\(\)"),
        (DRAWN_EDGES.t(), 5, r"shape \[2, num_edges\] \(got \[7, 2\]\)"),
        (torch.zeros(4, dtype=torch.int64), 5, r"shape \[2, num_edges\] \(got \[4\]\)"),
        (DRAWN_EDGES - 1, 5, r"from 0 to 4 \(got node -1\)"),
        (DRAWN_EDGES + 3, 5, r"from 0 to 4 \(got node 6\)\. .*graph has 5 nodes"),
        (EMPTY, 0, r"at least one node \(got 0\)"),
    ],
)
def test_a_malformed_graph_is_refused(edge_index: Tensor, num_nodes: int, text: str) -> None:
    with pytest.raises(GraphError, match=text):
        check_graph(edge_index, num_nodes)
    for sound in (DRAWN_EDGES, DRAWN_EDGES.int(), EMPTY):
        check_graph(sound, 5)


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
    with pytest.raises(GraphError, match=r"every chunk .* \(got chunk 1 has none\)"):
        plan_from_assignment(DRAWN_EDGES, 5, torch.tensor([0, 0, 2, 2, 2]))


def test_edge_sets_share_chunks_and_halos() -> None:
    """Edges of each set mapped back are those given, forward and reversed."""
    torch.manual_seed(0)
    given = torch.randint(20, (2, 70))
    plan = plan_from_assignment(given, 20, torch.arange(20) % 3).with_edge_sets((30, 0, 40))
    assert plan.num_edge_sets == 3
    for number, part in enumerate(given.split([30, 0, 40], dim=1)):
        for union, wanted in ((plan, part), (plan.reverse, part.flip([0]))):
            edge_set = union.edge_set(number)
            assert edge_set is union.edge_set(number)
            found = torch.empty_like(wanted)
            for chunk, whole in zip(edge_set.chunks, union.chunks, strict=True):
                assert torch.equal(chunk.halo, whole.halo)
                slots = edge_set.edge_perm[chunk.edge_start : chunk.edge_end]
                found[:, slots] = _edges_of(plan, chunk)
            assert torch.equal(found, wanted)
            whole = edge_set.whole.chunks[0]
            assert torch.equal(plan.perm[whole.edge_index], wanted[:, edge_set.edge_perm])


@pytest.mark.parametrize("seed", range(30))
def test_every_graph_is_in_one_micro_batch(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice((0, 1, 2, 30)) for _ in range(draw.randint(1, 40))]
    work = [3 * size for size in sizes]
    num_chunks = draw.randint(1, 12)
    plan = plan_micro_batches(work, sizes, num_chunks)
    filled = sum(size > 0 for size in sizes)
    assert plan.num_chunks == max(1, min(num_chunks, filled))
    assert sorted(plan.order) == list(range(len(sizes)))
    assert [chunk.start for chunk in plan.chunks[1:]] == [chunk.end for chunk in plan.chunks[:-1]]
    last = max((graph for graph, size in enumerate(sizes) if size), default=-1)
    for chunk in plan.chunks:
        graphs = plan.order[chunk.start : chunk.end]
        assert list(graphs) == sorted(graphs)
        inner = [graph for graph in graphs if graph <= last]
        if filled:  # what counts graphs by their nodes sees all of them
            assert sizes[inner[-1]] > 0
        assert chunk.is_whole == (plan.num_chunks == 1)


@pytest.mark.parametrize("seed", range(30))
def test_work_is_balanced(seed: int) -> None:
    """Graham's bound, against the larger of the mean and the largest graph."""
    draw = random.Random(seed)
    work = [draw.randint(1, 50) for _ in range(draw.randint(8, 60))]
    plan = plan_micro_batches(work, work, 8)
    best = max(sum(work) / 8, max(work))
    assert max(chunk.work for chunk in plan.chunks) <= 4 / 3 * best + max(work) / 3
    assert sum(chunk.work for chunk in plan.chunks) == sum(work)


def test_each_epoch_of_each_seed_draws_an_order_of_its_own() -> None:
    orders = {chunk_order(8, epoch=e, seed=s) for e in range(8) for s in range(8)}
    assert len(orders) == 64
    assert all(sorted(order) == list(range(8)) for order in orders)
    of_all_runs = (6, 2, 0, 7, 5, 1, 4, 3)  # whatever the seed of hash()
    assert chunk_order(8, epoch=5, seed=1) == of_all_runs
