"""A pass that fails in the middle, which the user catches, or that is made twice in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.staleness import METHODS
from lightning_gnnpipe.steps.training import PassState
from tests.helpers.engines import one_process_engine

NUM_NODES, WIDTH = 12, 3
EDGES = torch.stack([torch.arange(24) % 12, (torch.arange(24) * 5 + 1) % 12])
RIGHT = {"forward": 1000, "backward": 1000, "factor": 1.0}

# Kept where nobody takes it for an option of the layer.
torch.goes_wrong = dict(RIGHT)  # type: ignore[attr-defined]


class Fails(torch.autograd.Function):
    """Fails going forward or back once so many more rows have come, or scales the gradient."""

    @staticmethod
    def count(phase: str, rows: Tensor) -> Tensor:
        torch.goes_wrong[phase] -= 1
        if torch.goes_wrong[phase] < 0:
            raise torch.OutOfMemoryError(phase)
        return rows.clone()

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return Fails.count("forward", rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return Fails.count("backward", grad) * torch.goes_wrong["factor"]


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


class Steps:
    """A net in four chunks."""

    def __init__(self, method: str, dropout: float = 0.0) -> None:
        torch.goes_wrong.update(RIGHT)
        torch.manual_seed(0)
        self.net = Net(dropout).double()
        self.inputs = torch.randn(NUM_NODES, WIDTH, dtype=torch.float64), EDGES
        self.engine: PipelineEngine = one_process_engine(
            self.net, partition=torch.arange(NUM_NODES) % 4, method=METHODS[method]
        )

    def begin(self, number: int) -> None:
        self.engine.set_step(step_index=number)
        self.engine.state.abandon()

    def run(self) -> list[Tensor]:
        """Return the gradients of a pass."""
        self.net.zero_grad()
        self.engine.forward(self.inputs, {}).square().sum().backward()
        return [one.grad.clone() for one in self.net.parameters() if one.grad is not None]

    @property
    def is_exact(self) -> bool:
        assert self.engine.last_step.record is not None
        return self.engine.last_step.record.is_exact


def after_three(method: str, dropout: float = 0.0) -> Steps:
    steps = Steps(method, dropout)
    for number in range(3):
        steps.begin(number)
        steps.run()
    steps.begin(3)
    return steps


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("waits_for_next_step", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("method", METHODS)
def test_after_a_pass_that_failed_the_next_one_is_exact(
    method: str, phase: str, waits_for_next_step: bool
) -> None:
    """In the same step or the next, by gradients of the whole graph."""
    steps = after_three(method)
    torch.goes_wrong[phase] = 2
    with pytest.raises(torch.OutOfMemoryError, match=phase):
        steps.run()
    torch.goes_wrong[phase] = 1000
    if waits_for_next_step:
        steps.begin(4)
    found = steps.run()
    assert steps.is_exact
    steps.net.zero_grad()
    steps.net(*steps.inputs).square().sum().backward()
    for one, grad in zip(steps.net.parameters(), found, strict=True):
        torch.testing.assert_close(grad, one.grad, rtol=0, atol=1e-10)
    steps.run()
    assert not steps.is_exact


def test_what_one_rank_has_lost_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = after_three("drift")

    def with_another(what: str, numbers: list[int]) -> list[list[int]]:
        return [numbers, [*numbers[:4], 1, *numbers[5:]]]

    monkeypatch.setattr(steps.engine.transport.everyone, "meet", with_another)
    steps.run()
    assert steps.is_exact


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_one_layer_that_are_not_finite_cost_one_step(method: str) -> None:
    """As those of the square root of 0."""
    steps, found = Steps(method), []
    for number in range(7):
        steps.begin(number)
        torch.goes_wrong["factor"] = torch.inf if number == 2 else 1.0
        is_finite = all(bool(grad.isfinite().all()) for grad in steps.run())
        found.append((steps.is_exact, is_finite))
    fine, lost, exact = (False, True), (False, False), (True, True)
    assert found == [exact, fine, lost, exact, fine, fine, fine]


def test_an_overflow_of_a_scaled_loss_costs_no_exact_step() -> None:
    steps = after_three("drift")
    steps.engine.set_step(loss_scale=2.0**16)
    (steps.engine.forward(steps.inputs, {}).sum() * torch.inf).backward()
    assert not any(one.grad.isfinite().all() for one in steps.net.parameters())
    steps.begin(4)
    steps.run()
    assert not steps.is_exact


def test_two_passes_in_a_step_have_dropout_of_their_own() -> None:
    """And both draw it again, in whichever run."""
    drawn = []
    for _ in range(2):
        engine, outputs = (steps := after_three("constant", dropout=0.5)).engine, []
        engine.controls.is_exact = True
        for number in (3, 3, 4):
            engine.set_step(step_index=number)
            outputs.append(engine.forward(steps.inputs, {}))
            outputs[-1].sum().backward()
        drawn.append(outputs)
    first, second, third = drawn[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, third) and not torch.equal(second, third)
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))


@pytest.mark.parametrize(
    ("gradients", "is_lost"),
    [
        ([torch.sparse_coo_tensor([[0]], [torch.nan], (3,))], True),
        ([torch.sparse_coo_tensor([[0]], [1.0], (3,))], False),
        (None, True),
    ],
)
def test_what_is_lost(gradients: list[Tensor] | None, is_lost: bool) -> None:
    """With sparse gradients too, and if there is no backward behind outputs that are not finite."""
    outputs = [torch.zeros(2), torch.tensor([torch.inf if gradients is None else 1.0])]
    state = PassState()
    state.begin()
    state.end_forward(0, outputs, lambda: None)
    if gradients is None:
        assert not state.is_lost  # its gradients may yet be finite
        state.abandon()
    else:
        state.begin_backward(0, outputs)
        state.end_backward(gradients)
    assert (state.is_lost, state.num_awaiting) == (is_lost, 0)
