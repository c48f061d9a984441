"""Measured costs: equal layers cost the same, and what else runs meanwhile does not count."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn

from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.chunks import LayerCost, StepCosts, timing
from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.options import RunOptions, StrategyOptions
from lightning_gnnpipe.report import compare_times
from lightning_gnnpipe.stages import cut_module, split_layers
from lightning_gnnpipe.staleness import HistoryOptions, HostCopies
from lightning_gnnpipe.trainer import engine_host

N, D, L = 300, 16, 16


class Net(nn.Module):
    """L equal layers, and a linear layer before and behind them."""

    def __init__(self, widths: tuple[int, ...] = (D,) * (L + 1)) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, widths[0]), nn.Linear(widths[-1], 3)
        self.convs = nn.ModuleList(gnn.GCNConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.last(x)


class Residual(Net):
    """Layers that differ in a float, as those of GCNII do."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCN2Conv(D, 0.1, 0.5, layer + 1) for layer in range(L))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = initial = self.first(x)
        for conv in self.convs:
            x = conv(x, initial, edge_index).relu()
        return self.last(x)


class BusyClock:
    """A machine on which each pass takes 0.1 s, and something else runs now and then."""

    def __init__(self, seed: int) -> None:
        self._draw, self._now = random.Random(seed), 0.0

    def perf_counter(self) -> float:
        self._now += 0.1 + (10 * self._draw.random() if self._draw.random() < 0.1 else 0)
        return self._now


def measure(net: nn.Module, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, N, (2, 4 * N), generator=generator)
    call = flatten_call(net, (torch.randn(N, D, generator=generator), edges), {})
    inputs = classify(call)
    layers = cut_module(net, call, inputs)
    plan = plan_from_assignment(edges, N, torch.arange(N) * 4 // N)
    find = timing.measure_layers if not options else timing.measure_costs
    cut = options.pop("cut", plan)
    return layers, find(net, layers, cut, call, inputs, HistoryOptions(), **options)


@pytest.mark.parametrize("kind", [Net, Residual])
@pytest.mark.parametrize("longest_s", [1.0, 1e9])
@pytest.mark.parametrize("seed", range(3))
def test_equal_layers_are_cut_in_halves_on_a_busy_machine(
    seed: int, longest_s: float, kind: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where all layers are slow, so that there is no time to repeat each."""
    monkeypatch.setattr(timing, "time", BusyClock(seed))
    monkeypatch.setattr(timing, "_LONGEST_S", longest_s)
    layers, found = measure(kind())
    assert found.assign_layers(layers, 2, ()) == (L // 2, L // 2)
    assert len({cost.compute_s for cost in found.layers[1:-1]}) == 1


def test_memory_of_a_timing_is_free_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs follow each other, and each one's matrices and histories would add up."""
    made = list[weakref.ref[timing.MessageContext]]()
    begin = timing.MessageContext.__init__

    def begin_and_note(self: timing.MessageContext, *args: Any) -> None:
        begin(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(timing.MessageContext, "__init__", begin_and_note)
    gc.collect()
    gc.disable()
    try:
        measure(Net())
        alive = [one() for one in made]
    finally:
        gc.enable()
    assert alive == [None]


class Dense(Net):
    """Layers without weights, whose inputs differ in their width."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SimpleConv() for _ in range(7))
        self.last = nn.Linear(D * 2**7, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = torch.cat((x, conv(x, edge_index)), -1)
        return self.last(x)


class Widening(Net):
    """Equal layers between weights of their own, of which the last but one is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SimpleConv() for _ in range(9))
        widths = [*[D] * 8, 2 * D, D]
        self.weights = nn.ParameterList(torch.randn(*sizes) for sizes in pairwise(widths))
        self.last = nn.Linear(D, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv, weight in zip(self.convs, self.weights, strict=True):
            x = conv(x @ weight, edge_index).relu()
        return self.last(x)


class Mixing(Net):
    """A last layer that reads and saves the outputs of all."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.LGConv() for _ in range(L))
        self.alpha = nn.Parameter(torch.randn(L))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, total = self.first(x), 0.0
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            total = total + self.alpha[i] * x
        return self.last(total)


@pytest.mark.parametrize(
    ("kind", "num_run"), [(Net, 6), (Residual, 6), (Dense, 7), (Widening, 8), (Mixing, 7)]
)
def test_equal_layers_are_timed_four_times(
    kind: type[Net], num_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are said to save and keep the same bytes as if they had run."""
    runs: list[int] = []
    run = timing._run

    def counted(segment: Any, *args: Any, **named: Any) -> Any:
        runs.append(segment.index)
        return run(segment, *args, **named)

    monkeypatch.setattr(timing, "_run", counted)
    monkeypatch.setattr(timing, "_LONGEST_S", 0.0)
    net = kind()
    _, found = measure(net)
    assert len(set(runs)) == num_run
    monkeypatch.setattr(timing, "_ENOUGH", L)
    runs.clear()
    layers, every = measure(net)
    assert len(set(runs)) == len(layers.segments)
    for one, its in zip(found.layers, every.layers, strict=True):
        assert (one.saved_bytes, one.history_bytes) == (its.saved_bytes, its.history_bytes)
        assert (one.pushed, one.is_sum) == (its.pushed, its.is_sum)


def test_layers_of_other_widths_cost_what_they_take() -> None:
    layers, found = measure(Net((D, D, D, 64 * D, 64 * D, D)))
    assert found.layers[3].compute_s > 3 * found.layers[1].compute_s
    assert len(layers.segments) == 5


def made_costs(layer_s: float, num_chunks: int) -> StepCosts:
    return StepCosts((LayerCost(layer_s, 0.0, 0),) * L, {}, num_chunks)


@pytest.mark.parametrize(
    ("finer_s", "num_nodes", "chosen"),
    [
        (4.0, N, 2),  # four times as many chunks take four times as long: all is overhead
        (9.0, N, 2),
        (1.24, N, 8),  # 1 % more for each chunk: 4 chunks take 1.20 s, 8 take 1.125, 16 take 1.15
        (1.0, N, 16),  # no overhead: 32 would be less than 5 % faster
        (0.5, N, 16),
        (1.0, 11, 8),
        (1.0, 1, 1),
    ],
)
def test_as_many_chunks_are_chosen_as_pay(finer_s: float, num_nodes: int, chosen: int) -> None:
    layers, _ = measure(Net())
    stages = split_layers(layers, (L // 2, L // 2))
    found = made_costs(1.0, 8).with_overhead(made_costs(finer_s, 32))
    assert found.choose_num_chunks(stages, num_nodes) == chosen
    in_one = L * max(1 / 8, min(1.0, 1 - 7 * (finer_s - 1) / 24))
    for number, expected in ((8, L), (1, in_one)):
        there = found.at(number)
        assert sum(one.compute_s for one in there.layers) == pytest.approx(expected)
        assert sum(one.compute_s for one in there.at(8).layers) == pytest.approx(L)  # and back


def test_overhead_is_found_from_fewer_chunks_as_well() -> None:
    """In one chunk a layer takes 1 s, in 8 it takes 1.7 s."""
    found = made_costs(1.7, 8).with_overhead(made_costs(1.0, 1))
    assert found.at(16).layers[0].compute_s == pytest.approx(2.5)


def test_chunks_take_no_less_than_one_chunk() -> None:
    found = made_costs(0.6, 8).with_overhead(made_costs(1.0, 1))
    assert found.layers[0].compute_s == found.at(32).layers[0].compute_s == 1.0
    assert not found.is_disturbed


@pytest.mark.parametrize(("chunks_s", "num_chunks", "whole_s"), [(1.0, 8, 19.0), (19.0, 4, 1.0)])
def test_times_of_a_busy_machine_are_not_ranked(
    chunks_s: float, num_chunks: int, whole_s: float
) -> None:
    """One chunk takes no longer than several, and they no longer than each as long as it."""
    found = made_costs(chunks_s, num_chunks).with_overhead(made_costs(whole_s, 1))
    unused: Any = None
    text = engine_host._expect(unused, found.at(2), unused, unused, unused, 2)
    assert "the machine was busy" in text and " s " not in text


def test_what_is_compared_is_told() -> None:
    assert compare_times({4: 2.0, 2: 3.0, 8: 2.5}, 2) == (
        "Computing a step, without sending, takes about 1.000 s in 4 chunks "
        "(1.500 s in 2, 1.250 s in 8)."
    )


def test_the_number_of_chunks_that_is_given_or_needed_is_not_chosen() -> None:
    def run(**given: Any) -> RunOptions:
        return RunOptions(StrategyOptions(**given), 2, chosen=6)

    assert [run().num_chunks, run().count_chunks(N), run().count_chunks(5)] == [6, 6, 5]
    assert run(num_chunks=3).count_chunks(N) == 3
    assert run(partition=torch.arange(N) % 7).count_chunks(N) == 7
    alone = [RunOptions(StrategyOptions(**one), 1) for one in ({}, {"recompute": True})]
    assert [one.count_chunks(N) for one in alone] == [1, 1]
    assert [one.num_chunks for one in alone] == [4, 4]  # micro-batches
    assert not RunOptions(StrategyOptions(recompute=True), 2).measures_chunks(L)
    fresh = RunOptions(StrategyOptions(), 2)
    assert fresh.measures_chunks(L) and fresh.count_chunks(N) == 8
    assert not fresh.measures_chunks(2)  # no stage could have more layers
    torch.use_deterministic_algorithms(True)
    try:
        assert not fresh.measures_chunks(L)
    finally:
        torch.use_deterministic_algorithms(False)


def test_making_tables_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step makes the histories and their gradients again."""
    slow_s, made, table = 0.2, list[Tensor](), HostCopies.table

    def make(self: HostCopies, *args: Any) -> Tensor:
        time.sleep(slow_s)
        made.append(table(self, *args))
        return made[-1]

    monkeypatch.setattr(HostCopies, "table", make)
    monkeypatch.setattr(timing, "_LONGEST_S", 0.0)  # most layers run once
    _, found = measure(Net((D,) * 4))
    assert len(made) >= 4  # of two layers and their gradients
    assert sum(cost.compute_s for cost in found.layers) < slow_s


@pytest.mark.parametrize("is_fork", [False, True])
def test_one_device_is_timed_with_a_thread_a_core_where_that_cannot_hang(
    is_fork: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    monkeypatch.setattr(timing, "forks", [0] * is_fork)
    seen, net = list[int](), Net((D, D, D))
    net.last.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    _, found = measure(net, shares_cores=True)
    assert set(seen) == ({1} if is_fork else {1, 2}) and torch.get_num_threads() == 1
    assert len(found.by_all_cores) == (not is_fork) * len(found.layers)
    once_s, again_s = (found.alone_s(recompute=one) for one in (False, True))
    assert again_s - once_s == pytest.approx(sum(one.forward_s for one in found.by_all_cores))


def test_layers_are_also_timed_as_pyg_computes_them() -> None:
    """PyG's GCN has autograd keep the weight of each edge, fused aggregation nothing of edges."""
    _, found = measure(Net(), cut=1, beside_pyg=True)
    assert len(found.by_pyg) == len(found.layers)
    more = [a.saved_bytes - b.saved_bytes for a, b in zip(found.by_pyg, found.layers, strict=True)]
    assert min(more) >= 4 * N * 4, more
    assert not measure(Net(), cut=1, beside_pyg=False)[1].by_pyg


def test_frozen_layers_take_the_time_of_frozen_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    net.first.requires_grad_(False)
    net.convs[: L // 2].requires_grad_(False)

    def take(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        return found * 0 + (1.0, 3.0 if found[2] else 0.0, found[2])

    run = timing._run
    monkeypatch.setattr(timing, "_run", take)
    _, found = measure(net)
    ahead = [one.backward_s for one in found.layers]
    assert max(ahead[: L // 2]) == 0 < min(ahead[L // 2 :]), ahead


@pytest.mark.parametrize("conv", [gnn.GATConv, gnn.GCNConv])
def test_a_layer_that_runs_takes_more_than_it_saves(conv: Any) -> None:
    net = Net((D, D, D))
    net.convs = nn.ModuleList(conv(D, D) for _ in range(2))
    _, found = measure(net)
    assert all(one.running_bytes > one.saved_bytes > 0 for one in found.layers)
    assert all(one.running_bytes > one.evaluated_bytes > 0 for one in found.layers)
    again = measure(net)[1].layers
    assert [one.running_bytes for one in again] == [one.running_bytes for one in found.layers]


def test_wider_inputs_take_more_while_an_equal_layer_runs() -> None:
    _, found = measure(Dense())
    running = [one.running_bytes for one in found.layers]
    assert all(wide > 1.5 * narrow for narrow, wide in pairwise(running[1:]))


@pytest.mark.parametrize("is_large", [False, True])
def test_a_number_of_large_chunks_is_compared_with_smaller_ones(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else "auto" would not see what chunks cost."""
    monkeypatch.setattr(timing, "_LARGE_WORK", 1 if is_large else 1 << 20)
    timed, measured = list[int](), timing.measure_layers

    def measure_one(module: Any, layers: Any, plan: Any, *args: Any, **options: Any) -> StepCosts:
        timed.append(plan.num_chunks)
        return measured(module, layers, plan, *args, **options)

    monkeypatch.setattr(timing, "measure_layers", measure_one)
    measure(Net((D, D)), cut=8, shares_cores=False)
    assert timed == ([8, 32] if is_large else [1, 8])


@pytest.mark.parametrize(
    ("conv", "expected"),
    [  # in 4 chunks; a self-loop for each 4 edges
        (gnn.GCNConv, (5 * 4 * 1.25, 2 * 8 * 1.25, 0)),
        (gnn.SAGEConv, (5 * 4, 0, 0)),
        (gnn.GATConv, (0, 0, 2 * 8 * (1 + 1.25))),
    ],
)
def test_edges_take_what_the_layers_keep_of_them(conv: Any, expected: tuple[float, ...]) -> None:
    net = Net((D, D))
    net.convs = nn.ModuleList([conv(D, D)])
    _, found = measure(net)
    assert found.edges == pytest.approx(expected, rel=0.06)
