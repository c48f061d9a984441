"""Rows that autograd saves and a history holds are kept once; gradients stay as they are."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.chunks import step
from lightning_gnnpipe.staleness import METHODS, HistoryStore, saved
from tests.helpers.engines import one_process_engine

N, D, NUM_CHUNKS = 24, 8, 3


class ChangedInPlace(nn.Module):
    """Adds to a layer's input in place once the layer has read it, then saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(D, D), gnn.GCN2Conv(D, 0.1), nn.Linear(D, D)
        self.next = gnn.SAGEConv(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x)
        h.add_(self.conv(h, x, edge_index))
        return self.next(self.last(h), edge_index)


def deep(make: Any) -> nn.Module:
    layers: list[Any] = [(nn.Identity(), "x -> x"), (nn.Identity(), "x -> h")]
    for _ in range(3):
        layers += [make(), nn.LayerNorm(D), nn.ReLU()]
    return gnn.Sequential("x, edge_index", layers)


MODELS = {
    "sage": lambda: deep(lambda: (gnn.SAGEConv(D, D), "x, edge_index -> x")),
    "gcn2": lambda: deep(lambda: (gnn.GCN2Conv(D, 0.1), "x, h, edge_index -> x")),
    "gat": lambda: deep(lambda: (gnn.GATConv(D, D), "x, edge_index -> x")),
    "changed in place": ChangedInPlace,
}


class Memory:
    """The share of pushed rows whose own memory is still held after the forward phase."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.shares: list[float] = []
        pushed: list[Any] = []
        push, after = HistoryStore.push, HistoryStore.after_forward

        def note(own: HistoryStore, key: Any, chunk: Any, rows: Tensor, **more: Any) -> None:
            pushed.append(weakref.ref(rows.untyped_storage()))
            push(own, key, chunk, rows, **more)

        def count(own: HistoryStore, *, takes_snapshot: bool) -> None:
            self.shares.append(sum(one() is not None for one in pushed) / len(pushed))
            pushed.clear()
            after(own, takes_snapshot=takes_snapshot)

        patch.setattr(HistoryStore, "push", note)
        patch.setattr(HistoryStore, "after_forward", count)


def gradients(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = MODELS[name]().double()
    graph = torch.randn(N, D, dtype=torch.float64), torch.randint(0, N, (2, 5 * N))
    parts = torch.arange(N) % NUM_CHUNKS
    engine = one_process_engine(net, partition=parts, method=METHODS["drift"], self_check=False)
    for number in range(3):
        engine.set_step(step_index=number)
        net.zero_grad()
        engine.forward(graph, {}).square().sum().backward()
        with torch.no_grad():
            for one in net.parameters():
                one -= 0.01 * one.grad if one.grad is not None else 0
    return [one.grad for one in net.parameters() if one.grad is not None]


@pytest.mark.parametrize(
    ("name", "before", "share"),
    [  # the first layer's rows are the input
        ("sage", 1, 1 / 3),
        ("gcn2", 1, 1 / 3),
        ("gat", 0.5, 0),
        ("changed in place", 1, 0.5),
    ],
)
def test_rows_are_kept_once(
    name: str, before: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch)
    expected = gradients(name)
    assert memory.shares == [before] * 3
    for module in (step, saved):
        monkeypatch.setattr(module, "LEAST_NODES", 1)
    torch.testing.assert_close(gradients(name), expected, rtol=0, atol=1e-13)
    assert memory.shares[3:] == [share] * 3
