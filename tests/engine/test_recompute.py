"""Activations computed again in backward: the same numbers, and fewer tensors kept."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.models import GCNII
from lightning_gnnpipe.staleness import StalenessMethod
from tests.helpers.device import DEVICE
from tests.helpers.engines import one_process_engine

N, D = 24, 6
PARTITION = torch.arange(N) * 5 % N // 7


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


NETS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Net,
    "gcnii": lambda: GCNII(D, D, 3, num_layers=4, dropout=0.5),
}


def graph() -> tuple[Tensor, Tensor]:
    number = torch.arange(70)
    edges = torch.stack([(number * 7 + number // 5) % N, (number * 3 + 1) % N])
    x = torch.sin(torch.arange(N * D, dtype=torch.float64)).view(N, D)
    return x.to(DEVICE), edges.to(DEVICE)


def train(
    name: str,
    *,
    recompute: bool,
    history_device: torch.device | None = None,
) -> list[dict[str, Tensor]]:
    """Return outputs, gradients and buffers of an exact step and three steps in chunks."""
    torch.manual_seed(0)
    net = NETS[name]().double().to(DEVICE)
    engine = one_process_engine(
        net,
        partition=PARTITION,
        recompute=recompute,
        method=StalenessMethod(linear_scale=2.0, message_scale=2.0),
        history_device=history_device,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    steps = []
    for step in range(4):
        engine.set_step(step_index=step)
        output = engine.forward(graph(), {})
        optimizer.zero_grad()
        output.square().sum().backward()
        found = {f"grad {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
        buffers = {f"buffer {n}": b.clone() for n, b in net.named_buffers()}
        steps.append({"output": output.detach(), **found, **buffers})
        optimizer.step()
    return steps


@pytest.mark.parametrize("name", NETS)
def test_the_numbers_are_the_same(name: str) -> None:
    kept, again = (train(name, recompute=recompute) for recompute in (False, True))
    for before, after in zip(kept, again, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_histories_on_another_device(name: str, recompute: bool) -> None:
    """`cpu:0` is the same memory as `cpu`, and another device to all that compares the two."""
    elsewhere = torch.device("cpu:0")
    assert elsewhere != torch.device("cpu")
    here = train(name, recompute=recompute)
    there = train(name, recompute=recompute, history_device=elsewhere)
    for before, after in zip(here, there, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_histories_on_another_device_under_autocast() -> None:
    """Linear layers push what weights promote, others what autocast made: one history for both."""
    x, edges = graph()
    torch.manual_seed(0)
    convs = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(2))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = convs

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    found = []
    for device in (None, torch.device("cpu:0")):
        engine = one_process_engine(Two(), partition=PARTITION, history_device=device)
        for step in range(3):
            engine.set_step(step_index=step)
            with torch.autocast("cpu", torch.bfloat16):
                output = engine.forward((x.float(), edges), {})
            output.float().sum().backward()
        found.append(output.detach().float())
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)


class AlwaysDrops(nn.Module):
    """Drops in evaluation as well, between layers that keep their halos."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GATConv(D, D), gnn.GATConv(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(self.first(x, edge_index), 0.5), edge_index)


@pytest.mark.parametrize("case", ["eval", "twice a step", "one chunk"])
def test_the_numbers_are_the_same_in_odd_cases(case: str) -> None:
    """Dropout in evaluation; two passes in one step; one chunk, with an evaluation in between."""
    found = []
    partition = torch.zeros_like(PARTITION) if case == "one chunk" else PARTITION
    for recompute in (False, True):
        torch.manual_seed(0)
        net = (AlwaysDrops() if case == "eval" else Net()).double()
        engine = one_process_engine(net, partition=partition, recompute=recompute)
        net.train(case != "eval")
        for number in range(4):
            engine.set_step(step_index=0 if case == "twice a step" else number)
            output = engine.forward(graph(), {})
            if case == "one chunk":
                with torch.no_grad():
                    engine.forward(graph(), {})
            net.zero_grad()
            output.square().sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.05 * parameter.grad
        named = {name: value.clone() for name, value in net.state_dict().items()}
        found.append({"output": output.detach(), **named})
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [gnn.GCNConv, gnn.GATConv, gnn.SAGEConv])
def test_histories_in_half_precision(make: Callable[..., nn.Module], recompute: bool) -> None:
    """They take half the memory; outputs and gradients are rounded, and no more than that."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make(D, D), make(D, D)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).tanh(), edge_index)

    x, edges = graph()
    found = {}
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        net = Two()
        engine = one_process_engine(
            net,
            partition=PARTITION,
            recompute=recompute,
            history_dtype=dtype,
        )
        for step in range(3):
            engine.set_step(step_index=step)
            output = engine.forward((x.float(), edges), {})
            assert output.dtype == torch.float32
            net.zero_grad()
            output.square().sum().backward()
        store = engine.graphs.trained.store
        assert {store.rows(key).dtype for key in store} == {dtype or torch.float32}
        found[dtype] = [output.detach(), *(p.grad for p in net.parameters())]
    for rounded, exact in zip(found[torch.bfloat16], found[None], strict=True):
        error = float((rounded - exact).norm() / exact.norm())
        assert 0 < error < 0.02


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
