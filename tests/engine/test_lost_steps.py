"""A pass that fails in the middle, which the user catches, or that is made twice in a step."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.staleness import METHODS
from tests.helpers.engines import one_process_engine

NUM_NODES, WIDTH = 12, 3
EDGES = torch.stack([torch.arange(24) % 12, (torch.arange(24) * 5 + 1) % 12])


# Kept where nobody takes it for an option of the layer.
torch.rows_left = {"forward": 1000, "backward": 1000}  # type: ignore[attr-defined]


class Fails(torch.autograd.Function):
    """Fails going forward or back once so many more rows have come, as where memory is short."""

    @staticmethod
    def count(phase: str, rows: Tensor) -> Tensor:
        torch.rows_left[phase] -= 1
        if torch.rows_left[phase] < 0:
            raise torch.OutOfMemoryError(phase)
        return rows.clone()

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return Fails.count("forward", rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return Fails.count("backward", grad)


class FailingConv(gnn.SAGEConv):
    """May fail."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return Fails.apply(super().forward(x, edge_index))


class Net(nn.Module):
    """Four layers, the third of which may fail."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        kinds = (gnn.SAGEConv, gnn.SAGEConv, FailingConv, gnn.SAGEConv)
        self.convs = nn.ModuleList(kind(WIDTH, WIDTH) for kind in kinds)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.dropout(conv(x, edge_index).tanh(), self.dropout, self.training)
        return x


def start(method: str, dropout: float = 0.0) -> tuple[Net, PipelineEngine, Tensor]:
    """Return a net in four chunks after three steps."""
    Fails.left = {"forward": 1000, "backward": 1000}
    torch.manual_seed(0)
    net, x = Net(dropout).double(), torch.randn(NUM_NODES, WIDTH, dtype=torch.float64)
    partition = torch.arange(NUM_NODES) % 4
    engine = one_process_engine(net, partition=partition, method=METHODS[method])
    for step in range(3):
        engine.set_step(step_index=step)
        engine.abandon()
        engine.forward((x, EDGES), {}).square().sum().backward()
    engine.set_step(step_index=3)
    engine.abandon()
    return net, engine, x


@pytest.mark.parametrize("waits_for_next_step", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("method", METHODS)
def test_after_a_pass_that_failed_the_next_one_is_exact(
    method: str, phase: str, waits_for_next_step: bool
) -> None:
    """In the same step or the next, by gradients of the whole graph."""
    net, engine, x = start(method)
    torch.rows_left[phase] = 2
    with pytest.raises(torch.OutOfMemoryError, match=phase):
        engine.forward((x, EDGES), {}).square().sum().backward()
    torch.rows_left[phase] = 1000
    if waits_for_next_step:
        engine.set_step(step_index=4)
        engine.abandon()
    for is_exact in (True, False):
        net.zero_grad()
        output = engine.forward((x, EDGES), {})
        output.square().sum().backward()
        assert engine.last_step.record is not None
        assert engine.last_step.record.is_exact == is_exact
        if is_exact:
            found = [one.grad.clone() for one in net.parameters() if one.grad is not None]
            net.zero_grad()
            net.forward(x, EDGES).square().sum().backward()
            for one, grad in zip(net.parameters(), found, strict=True):
                torch.testing.assert_close(grad, one.grad, rtol=0, atol=1e-10)


def test_what_one_rank_has_lost_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, x = start("drift")

    def with_another(what: str, numbers: list[int]) -> tuple[list[str], list[list[int]]]:
        return [what, what], [numbers, [*numbers[:4], 1, *numbers[5:]]]

    monkeypatch.setattr(engine.transport.everyone, "gather", with_another)
    engine.forward((x, EDGES), {}).square().sum().backward()
    assert engine.last_step.record is not None and engine.last_step.record.is_exact


class Root(torch.autograd.Function):
    """As the square root of 0: its gradient is not finite, in one pass."""

    is_zero: ClassVar[bool] = False

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * torch.inf if Root.is_zero else grad


class RootConv(gnn.SAGEConv):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return Root.apply(super().forward(x, edge_index))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_one_layer_that_are_not_finite_cost_one_step(method: str) -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(NUM_NODES, WIDTH, dtype=torch.float64)
    net.convs[2] = RootConv(WIDTH, WIDTH).double()
    engine = one_process_engine(net, partition=torch.arange(NUM_NODES) % 4, method=METHODS[method])
    found = []
    for step in range(7):
        engine.set_step(step_index=step)
        engine.abandon()
        net.zero_grad()
        Root.is_zero = step == 2
        engine.forward((x, EDGES), {}).square().sum().backward()
        grads = [one.grad for one in net.parameters() if one.grad is not None]
        assert engine.last_step.record is not None
        is_finite = all(bool(grad.isfinite().all()) for grad in grads)
        found.append((engine.last_step.record.is_exact, is_finite))
    fine, lost, exact = (False, True), (False, False), (True, True)
    assert found == [exact, fine, lost, exact, fine, fine, fine]


def test_two_passes_in_a_step_have_dropout_of_their_own() -> None:
    """And both draw it again, in whichever run."""
    drawn = []
    for _ in range(2):
        _, engine, x = start("constant", dropout=0.5)
        engine.controls.is_exact = True
        outputs = []
        for step in (3, 3, 4):
            engine.set_step(step_index=step)
            outputs.append(engine.forward((x, EDGES), {}))
            outputs[-1].sum().backward()
        drawn.append(outputs)
    first, second, third = drawn[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, third) and not torch.equal(second, third)
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
