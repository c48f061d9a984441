"""Weights that are carried forward: how far, for how long, and who sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_gnnpipe import DelayedGradients, DroppedGradients, LastRows, StalenessMethod
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.engine.lookahead import forecast
from lightning_gnnpipe.engine.resume import save_rank
from lightning_gnnpipe.history import GradientRule
from tests.helpers.engines import one_process_engine

NUM_NODES, WIDTH = 40, 8
EDGES = torch.randint(0, NUM_NODES, (2, 200), generator=torch.Generator().manual_seed(0))
LATE = DelayedGradients()


class Watched(gnn.GCNConv):
    """Tells when a chunk goes back; may keep its bias within a bound by itself."""

    on_backward: Callable[[Tensor], None] | None = None
    bound: float | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.bound is not None:
            with torch.no_grad():
                self.bias.clamp_(max=self.bound)
        return super().forward(*args, **kwargs)

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        if x_j.requires_grad and self.on_backward is not None:
            x_j.register_hook(self.on_backward)
        return super().message(x_j, edge_weight)


class Net(nn.Module):
    """A linear layer and four graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.convs = nn.ModuleList(Watched(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


class Run:
    """A net in four chunks, and what its first layers are computed with.

    Args:
        rule: For gradients.
        lookahead: The steps that are foreseen.
    """

    def __init__(
        self,
        rule: GradientRule = LATE,
        lookahead: int = 3,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = Net().to(dtype)
        self.x = torch.randn(NUM_NODES, WIDTH, dtype=dtype)
        self.engine: PipelineEngine = one_process_engine(
            self.net,
            partition=torch.arange(NUM_NODES) % 4,
            method=StalenessMethod(rule, LastRows(), lookahead),
            self_check=False,  # which draws weights of its own
            **options,
        )
        self.engine.attach()
        self.first, self.last = self.net.convs[0].lin.weight, self.net.convs[3].lin.weight
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.net.convs[0].register_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.seen.append((self.first.detach().clone(), self.last.detach().clone()))

    def step(self, *, is_exact: bool = False, move: Callable[[nn.Parameter], Tensor]) -> None:
        """Go forward and back, and move each parameter by what `move` returns for it."""
        self.seen.clear()
        self.engine.controls.is_exact = is_exact
        self.net.zero_grad()
        self.net(self.x, EDGES).square().sum().backward()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(move(parameter))

    def steps(self, number: int, size: float = 0.01) -> None:
        """Make an exact step, and after it some in chunks, all parameters moving alike."""
        for step in range(number):
            self.step(is_exact=not step, move=lambda parameter: torch.full_like(parameter, size))


@pytest.mark.parametrize(
    ("step", "before", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 3.0),
        ([1.0, 2.0], [-1.0, -2.0], 0.0),
        ([1.0, 2.0], [-2.0, 1.0], 0.0),
        ([0.5, 1.0], [1.0, 2.0], 0.5 + 0.25 + 0.125),
        ([1.0, 2.0], [0.5, 1.0], 0.5 + 0.25 + 0.125),
        ([0.0, 0.0], [1.0, 2.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e3, 2e3], [1.0, 2.0], 1e-3 + 1e-6 + 1e-9),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_steps_that_go_on_are_foreseen(
    step: list[float], before: list[float], expected: float, dtype: torch.dtype
) -> None:
    ones = torch.ones(3, 1, dtype=torch.float32)
    found = forecast(
        [torch.tensor(step, dtype=dtype), ones], [torch.tensor(before, dtype=dtype), ones], 3
    )
    torch.testing.assert_close(found, torch.tensor([expected, 3.0], dtype=found.dtype))
    assert found.isfinite().all()


def test_of_steps_that_are_too_large_to_tell_none_are_foreseen() -> None:
    for size in (1e30, torch.inf, torch.nan):
        step = torch.full((4,), size, dtype=torch.float32)
        assert forecast([step], [step], 3).tolist() == [0.0]


def test_infinite_weights_stay_and_the_others_go_on() -> None:
    run = Run()

    def move(parameter: nn.Parameter) -> Tensor:
        return torch.full_like(parameter, 0.01)

    with torch.no_grad():
        run.net.convs[3].bias[0] = -torch.inf  # as of a gate; tanh makes -1 of it
    own = torch.empty(0)
    for step in range(5):
        own = run.first.detach().clone()
        run.step(is_exact=not step, move=move)
    for first, _ in run.seen:
        torch.testing.assert_close(first, own + 3 * 0.01, rtol=1e-12, atol=1e-12)
    assert run.net.convs[3].bias[0] == -torch.inf
    assert all(one.grad is not None and one.grad.isfinite().all() for one in run.net.parameters())


def test_small_steps_in_half_precision_are_foreseen() -> None:
    """Their squares would be zero."""
    step = torch.full((4,), 1e-5, dtype=torch.float16)
    torch.testing.assert_close(forecast([step], [step], 2), torch.tensor([2.0]))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rule", [LATE, DroppedGradients()])
def test_a_step_is_computed_with_weights_further_on(rule: GradientRule, recompute: bool) -> None:
    """From the third in chunks after an exact one, forward and backward; nobody else sees it."""
    run = Run(rule, recompute=recompute)
    in_chunks = 0
    for step in range(9):
        is_exact = step in (0, 4)
        in_chunks = 0 if is_exact else in_chunks + 1
        own = run.first.detach().clone(), run.last.detach().clone()

        def move(parameter: nn.Parameter) -> Tensor:
            return torch.full_like(parameter, 0.01)

        run.step(is_exact=is_exact, move=move)
        assert len(run.seen) >= (1 if is_exact else 4) * (1 + recompute)
        for seen in run.seen:
            for found, weight in zip(seen, own, strict=True):
                ahead = weight + 3 * 0.01 * (in_chunks > 2)
                torch.testing.assert_close(found, ahead, rtol=1e-12, atol=1e-12)
        for weight, before in zip((run.first, run.last), own, strict=True):
            assert torch.equal(weight, before + 0.01)


def test_weights_that_swing_stay_where_they_are() -> None:
    run = Run()
    run.steps(4)
    for step in range(4):
        own = run.first.detach().clone()
        sign = -1 if step % 2 else 1
        run.step(move=lambda parameter: torch.full_like(parameter, sign * 0.01))  # noqa: B023
        if step > 1:
            assert all(torch.equal(first, own) for first, _ in run.seen)


def test_weights_that_the_user_has_set_are_hardly_carried() -> None:
    """A jump is no step that goes on."""
    run = Run()
    run.steps(5)
    run.net.load_state_dict({name: value + 10 for name, value in run.net.state_dict().items()})
    own = run.first.detach().clone()
    run.step(move=torch.zeros_like)
    assert all(0 < float((first - own).abs().max()) < 0.011 for first, _ in run.seen)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_the_module_writes_to_stay_where_they_are(recompute: bool) -> None:
    """Else what it has written would be lost with those that it was computed with."""
    run = Run(recompute=recompute)
    conv = run.net.convs[3]
    conv.bound = 0.5
    run.steps(8, size=0.1)
    own = run.first.detach().clone()
    run.step(move=torch.zeros_like)
    assert (conv.bias == 0.5).all()  # as it has written it, not 0.6
    first = own + 3 * 0.1
    assert all(torch.allclose(seen, first, rtol=1e-12, atol=1e-12) for seen, _ in run.seen)
    graph = run.engine.graphs.trained
    assert graph is not None
    saved = save_rank(graph)["last_weights"]  # a run that goes on does not carry it either
    assert "convs.0.lin.weight" in saved["steps"] and "convs.3.bias" not in saved["values"]


@pytest.mark.parametrize("where", ["forward", "backward", "begin"])
def test_weights_are_back_after_an_error(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.steps(4)
    own = {name: (p, p.detach().clone()) for name, p in run.net.named_parameters()}
    calls: list[None] = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyError(where)

    if where == "forward":
        run.net.convs[2].register_forward_pre_hook(fail)
    elif where == "backward":
        run.net.convs[2].on_backward = fail
    else:
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: fail(calls.append(None)))
    with pytest.raises(KeyError, match=where):
        run.step(move=torch.zeros_like)
    assert all(torch.equal(parameter, value) for parameter, value in own.values())


@pytest.mark.parametrize("change", ["prune", "freeze"])
def test_parameters_come_and_go(change: str) -> None:
    run = Run()
    run.steps(4)
    lin = run.net.lin
    if change == "prune":
        prune.l1_unstructured(lin, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    else:
        lin.requires_grad_(False)
    for _ in range(3):
        run.step(move=lambda p: torch.full_like(p, 0.01) if p.requires_grad else p.detach() * 0)
    assert all(p.grad is not None for p in run.net.parameters() if p.requires_grad)


def test_autocast_does_not_keep_them() -> None:
    """It keeps what it has made of a parameter, whatever becomes of its data."""
    run = Run(dtype=torch.float32)
    weight = run.net.lin.weight
    for step in range(5):
        run.engine.controls.is_exact = not step
        with torch.autocast("cpu", torch.bfloat16):
            run.seen.clear()
            output = run.net(run.x, EDGES)
            head = nn.functional.linear(run.x, weight)
        assert torch.equal(head, nn.functional.linear(run.x.bfloat16(), weight.detach().bfloat16()))
        assert torch.equal(run.seen[-1][0], run.first) == (step < 3)
        output.float().sum().backward()
        with torch.no_grad():
            for parameter in run.net.parameters():
                parameter.add_(0.01)
