"""Activations computed again in backward: the same numbers, and fewer tensors kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.chunks import threads
from lightning_gnnpipe.models import GCNII
from lightning_gnnpipe.staleness import StalenessMethod
from tests.helpers.device import DEVICE
from tests.helpers.engines import one_process_engine

N, D = 24, 6
PARTITION = torch.arange(N) * 5 % N // 7
ELSEWHERE = torch.device("cpu:0")
"""The same memory as `cpu`, and another device to all that compares the two."""


class Net(nn.Module):
    """A linear layer, attention, a norm over all nodes, dropout, an overwritten sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GCNConv(D, D), gnn.GATConv(D, D)
        self.third, self.norm = gnn.SAGEConv(D, D), nn.BatchNorm1d(D)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu_()
        x = x + self.dropout(self.second(x, edge_index))
        return self.third(self.norm(x).relu(), edge_index)


class Two(nn.Module):
    """Two layers, and between them what drops in evaluation as well, or not."""

    def __init__(self, make: Callable[..., nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.dropout = make(D, D), make(D, D), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh()
        return self.second(nn.functional.dropout(x, self.dropout), edge_index)


class Iterates(nn.Module):
    """A power iteration on its weight updates buffers in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = gnn.GCNConv(D, D), gnn.GCNConv(D, D)
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(self.conv(x, edge_index).tanh())
        return self.last(x, edge_index)


class Summed(nn.Module):
    """Sums its layers' outputs: the gradient of the sum is that of the last output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        total = x
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
            total = total + x
        return total


NETS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Net,
    "summed": Summed,
    "iterates": Iterates,
    "gcnii": lambda: GCNII(D, D, 3, num_layers=4, dropout=0.5),
    "drops always": lambda: Two(gnn.GATConv, 0.5),
}


def graph() -> tuple[Tensor, Tensor]:
    number = torch.arange(70)
    edges = torch.stack([(number * 7 + number // 5) % N, (number * 3 + 1) % N])
    x = torch.sin(torch.arange(N * D, dtype=torch.float64)).view(N, D)
    return x.to(DEVICE), edges.to(DEVICE)


def train(
    name: str,
    *,
    steps: tuple[int, ...] = (0, 1, 2, 3),
    training: bool = True,
    lr: float = 1e-4,
    partition: Tensor = PARTITION,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Return outputs, gradients and buffers of an exact step and three steps in chunks."""
    torch.manual_seed(0)
    net = NETS[name]().double().to(DEVICE).train(training)
    method = StalenessMethod(linear_scale=2.0, message_scale=2.0)
    engine = one_process_engine(net, partition=partition, method=method, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    found = []
    for step in steps:
        engine.set_step(step_index=step)
        output = engine.forward(graph(), {})
        optimizer.zero_grad()
        output.square().sum().backward()
        grads = {f"grad {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
        buffers = {f"buffer {n}": b.clone() for n, b in net.named_buffers()}
        found.append({"output": output.detach(), **grads, **buffers})
        optimizer.step()
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("mixed", {}),
    "gcnii": ("gcnii", {}),
    "dropout in evaluation": ("drops always", {"training": False, "lr": 0.05}),
    "two passes in a step": ("mixed", {"steps": (0, 0, 0, 0), "lr": 0.05}),
    "one chunk": ("mixed", {"partition": torch.zeros_like(PARTITION), "lr": 0.05}),
    "power iteration": ("iterates", {"partition": torch.zeros_like(PARTITION), "lr": 0.05}),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_the_same(case: str) -> None:
    name, options = CASES[case]
    kept, again = (train(name, recompute=recompute, **options) for recompute in (False, True))
    close = 1e-12 if DEVICE.type == "cpu" else 1e-10  # a GPU adds messages in any order
    torch.testing.assert_close(again, kept, rtol=close, atol=close)


def run_two(
    make: Callable[..., nn.Module], *, autocast: bool = False, **options: Any
) -> tuple[list[Tensor], Any]:
    """Return output and gradients of the last of three steps in single precision, the engine."""
    torch.manual_seed(0)
    x, edges = graph()
    net = Two(make)
    engine = one_process_engine(net, partition=PARTITION, **options)
    for step in range(3):
        engine.set_step(step_index=step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = engine.forward((x.float(), edges), {})
        assert autocast or output.dtype == torch.float32
        net.zero_grad()
        output.float().square().sum().backward()
    return [output.detach().float(), *(p.grad for p in net.parameters())], engine


def test_histories_on_another_device_under_autocast() -> None:
    """Linear layers push what weights promote, others what autocast made: one history for both."""
    (here, *_), _ = run_two(gnn.GCNConv, autocast=True)
    (there, *_), _ = run_two(gnn.GCNConv, autocast=True, history_device=ELSEWHERE)
    torch.testing.assert_close(there, here, rtol=0.05, atol=0.05)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [gnn.GCNConv, gnn.GATConv, gnn.SAGEConv])
def test_histories_in_half_precision(make: Callable[..., nn.Module], recompute: bool) -> None:
    """They take half the memory; outputs and gradients are rounded, and no more than that."""
    found = []
    for dtype in (None, torch.bfloat16):
        tensors, engine = run_two(make, recompute=recompute, history_dtype=dtype)
        store = engine.graphs.trained.store
        assert {store.rows(key).dtype for key in store} == {dtype or torch.float32}
        found.append(tensors)
    for exact, rounded in zip(*found, strict=True):
        error = float((rounded - exact).norm() / exact.norm())
        assert 0 < error < 0.02


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("is_exact", [True, False])
def test_fewer_tensors_are_kept_between_forward_and_backward(is_exact: bool) -> None:
    """Of N-row tensors a layer keeps its input, or its sums, and no more."""

    def count(recompute: bool) -> int:
        torch.manual_seed(0)
        num_nodes, width = 997, 16
        net = GCNII(width, width, 3, num_layers=8, dropout=0.5)
        number = torch.arange(3000)
        edges = torch.stack([(number * 7) % num_nodes, (number * 3 + 1) % num_nodes])
        partition = torch.arange(num_nodes) * 8 // num_nodes
        engine = one_process_engine(net, partition=partition, recompute=recompute)
        x = torch.randn(num_nodes, width)
        engine.forward((x, edges), {}).sum().backward()
        engine.controls.is_exact = is_exact
        engine.set_step(step_index=1)
        gc.collect()
        saved: set[int] = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.add(t.untyped_storage().data_ptr()) or t, lambda t: t
        ):
            output = engine.forward((x, edges), {})
        kept = len(saved)
        output.sum().backward()
        return kept

    assert count(recompute=True) < count(recompute=False) / 3


@pytest.mark.parametrize("options", [{}, {"exact_in_chunks": True, "num_stages": 2}])
@pytest.mark.parametrize("is_divided", [True, False])
def test_stages_that_take_turns_use_all_cores(
    options: dict[str, Any], is_divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has set the number of threads."""
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(threads.DIVIDED_CORES, "1" if is_divided else "2")  # of another program
    seen = list[int]()

    class Noting(gnn.GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            found: Tensor = super().forward(x, edge_index)
            seen.append(torch.get_num_threads())
            if found.requires_grad:
                found.register_hook(lambda _: seen.append(torch.get_num_threads()))
            return found

    net = Two(Noting).double()
    engine = one_process_engine(net, partition=PARTITION, self_check=False, **options)
    for step in range(2):
        seen.clear()
        engine.set_step(step_index=step)
        engine.forward(graph(), {}).sum().backward()
        assert seen[-4:] == [3 if is_divided and step == 0 else 1] * 4  # tracing comes before
        assert torch.get_num_threads() == 1
