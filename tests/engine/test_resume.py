"""Histories go into a checkpoint and come out of it by node, whatever the chunks are."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.comm import Meter, Transport, World
from lightning_gnnpipe.engine.known_graphs import Histories, KnownInputs, PlannedGraph
from lightning_gnnpipe.engine.resume import (
    InputState,
    RunState,
    SavedHistories,
    load_ranks,
    save_rank,
)
from lightning_gnnpipe.errors import CheckpointError
from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.passing import CallKey
from lightning_gnnpipe.staleness import HistoryOptions, StalenessMethod

# A ring of six nodes.
EDGES = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
H, OTHER = (CallKey(segment, "conv", 0, "x") for segment in (0, 5))
STATISTIC = CallKey(0, "n", 0, "statistics")


def planned(assignment: list[int], options: HistoryOptions | None = None) -> Histories:
    plan = plan_from_assignment(EDGES, 6, torch.tensor(assignment))
    world = World(0, 1, torch.device("cpu"), timedelta(seconds=1))
    transport = Transport(world, (1, 1), Meter())
    return Histories(PlannedGraph(plan, transport, None), options or HistoryOptions(), transport)


def push(own: Histories, key: CallKey, by_node: Tensor) -> None:
    for chunk in own.graph.plan.chunks:
        own.store.push(key, chunk, by_node[own.graph.plan.perm[chunk.start : chunk.end]])


def by_node(own: Histories, key: CallKey) -> Tensor:
    rows = torch.empty_like(own.store.rows(key))
    rows[own.graph.plan.perm] = own.store.rows(key)
    return rows


@pytest.mark.parametrize(
    "assignment", [[1, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [1, 1, 0, 0, 1, 0]]
)
def test_rows_and_snapshots_follow_their_nodes(assignment: list[int]) -> None:
    options = HistoryOptions(StalenessMethod(snapshot_steps=4))
    first = planned([1, 0, 1, 0, 1, 0], options)
    first.store.begin_step(3)
    push(first, H, torch.arange(6.0).view(6, 1))
    first.store.after_forward(takes_snapshot=True)
    first.store.begin_step(5)
    push(first, H, torch.arange(6.0).view(6, 1) * 10)
    first.store.after_forward(takes_snapshot=False)
    first.store.moments.keep(STATISTIC, torch.arange(4.0).view(4, 1), None)

    second = planned(assignment, options)
    load_ranks(second, [save_rank(first)], {0})
    assert by_node(second, H).flatten().tolist() == [0, 10, 20, 30, 40, 50]
    saved = second.store.save(H)
    assert (saved["step"], saved["kept_step"]) == (5, 3)
    moments = second.store.moments.calls[STATISTIC]
    assert (moments.num_rows, moments.center) == (4, 1.5)
    second.store.before_forward(is_exact=False, reads_snapshot=True)
    assert by_node(second, H).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    chunk = second.graph.plan.chunks[0]
    halo = second.store.read(H, chunk)[0][chunk.halo]
    assert halo.flatten().tolist() == second.graph.plan.perm[chunk.halo].tolist()


def test_a_stage_takes_its_own_layers_alone() -> None:
    first = planned([0, 0, 0, 1, 1, 1])
    for key in (H, OTHER):
        push(first, key, torch.ones(6, 1))
    second = planned([0, 0, 0, 1, 1, 1])
    load_ranks(second, [save_rank(first)], {5})
    assert list(second.store) == [OTHER]


def test_a_history_is_kept_as_this_run_keeps_it() -> None:
    first = planned([0, 0, 0, 1, 1, 1])
    push(first, H, torch.ones(6, 1))
    second = planned([0, 0, 0, 1, 1, 1], HistoryOptions(dtype=torch.bfloat16))
    load_ranks(second, [save_rank(first)], {0})
    assert second.store.rows(H).dtype == torch.bfloat16


@pytest.mark.parametrize("change", [{"version": 99}, {"version": None}, {"seed": ...}])
def test_a_state_in_another_format_is_refused(change: dict[str, object]) -> None:
    state = asdict(RunState(1, 2, 3, (4, 5), 1, (), ("norm",), 0, 8)) | change
    state = {key: value for key, value in state.items() if value is not ...}
    with pytest.raises(CheckpointError, match="the state of a pipeline in format 20"):
        RunState.of(state)


def test_a_refresh_is_of_inputs_that_no_step_of_a_resumed_run_has_taken() -> None:
    known = KnownInputs(is_quiet=True)
    for number, is_renewed in enumerate([False, True]):
        state = InputState(number, (), 0, is_renewed, is_refresh_due=False)
        known.saved[number] = SavedHistories(state, ())
    known.ask_refresh()
    assert [one.state.is_refresh_due for one in known.saved.values()] == [True, False]
    known.end_step(planned([0] * 6), 0, ())  # of another input: weights have changed
    known.ask_refresh()
    assert [one.state.is_refresh_due for one in known.saved.values()] == [True, True]
