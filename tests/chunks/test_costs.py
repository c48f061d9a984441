"""Measured costs: equal layers cost the same, and what else runs meanwhile does not count."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn

from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.chunks import costs
from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.stages import cut_module
from lightning_gnnpipe.staleness import HistoryOptions

N, D, L = 300, 16, 16


class Net(nn.Module):
    """L equal layers, and a linear layer before and behind them."""

    def __init__(self, widths: tuple[int, ...] = (D,) * (L + 1)) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, widths[0]), nn.Linear(widths[-1], 3)
        pairs = pairwise(widths)
        self.convs = nn.ModuleList(gnn.GCNConv(a, b) for a, b in pairs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.last(x)


class BusyClock:
    """A machine on which each pass takes a second, and something else runs now and then."""

    def __init__(self, seed: int) -> None:
        self._draw, self._now = random.Random(seed), 0.0

    def perf_counter(self) -> float:
        self._now += 1 + (100 * self._draw.random() if self._draw.random() < 0.1 else 0)
        return self._now


def measure(net: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, N, (2, 4 * N), generator=generator)
    call = flatten_call(net, (torch.randn(N, D, generator=generator), edges), {})
    inputs = classify(call)
    layers = cut_module(net, call, inputs)
    plan = plan_from_assignment(edges, N, torch.arange(N) * 4 // N)
    return layers, costs.measure_layers(net, layers, plan, call, inputs, HistoryOptions())


@pytest.mark.parametrize("seed", range(3))
def test_equal_layers_are_cut_in_halves_on_a_busy_machine(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "time", BusyClock(seed))
    monkeypatch.setattr(costs, "_LONGEST_S", 1e9)
    layers, found = measure(Net())
    assert found.assign_layers(layers, 2, ()) == (L // 2, L // 2)
    assert len({cost.compute_s for cost in found.layers[1:-1]}) == 1


def test_layers_of_other_widths_cost_what_they_take() -> None:
    layers, found = measure(Net((D, D, D, 64 * D, 64 * D, D)))
    assert found.layers[3].compute_s > 3 * found.layers[1].compute_s
    assert len(layers.segments) == 5
