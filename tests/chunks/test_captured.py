"""Chunks as CUDA graphs: the same numbers as eager code, in any order of chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.options import RunOptions, StrategyOptions
from lightning_gnnpipe.staleness import METHODS
from tests.helpers.cuda_graphs import cuda_graphs
from tests.helpers.device import DEVICE
from tests.helpers.engines import one_process_engine
from tests.helpers.graphs import communities
from tests.helpers.launch import FitResult, run_fit
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import assert_steps_equal

D, NUM_CHUNKS, NUM_STEPS = 4, 4, 9
EXACT, RECORDED = 5, 6  # steps that run eagerly in between


def net(conv: Callable[[], Any], norm: Callable[[], Any]) -> nn.Module:
    layers: list[Any] = [(nn.Linear(D, D), "x -> x")]
    for _ in range(3):
        layers += [(conv(), "x, edge_index -> x"), (norm(), "x -> x"), nn.ReLU(), nn.Dropout(0.3)]
    return gnn.Sequential("x, edge_index", layers).double()


def graph() -> tuple[Tensor, Tensor]:
    nodes = torch.arange(5 * NUM_CHUNKS)
    edges = torch.cartesian_prod(nodes, nodes).T
    near = (edges[0] - edges[1]).abs() % 7
    edges = edges[:, (near > 0) & (near < 4)]
    return torch.randn(len(nodes), D, dtype=torch.float64).to(DEVICE), edges.to(DEVICE)


def train(
    module: nn.Module,
    *,
    captured: bool,
    change: Callable[[int, nn.Module], None] = lambda step, module: None,
    needs_grad: bool = False,
    mixed: bool = False,
) -> list[Tensor]:
    """Return outputs, gradients, buffers and weights of all steps."""
    x, edges = graph()
    x = x.to(next(module.parameters()).dtype)
    x.requires_grad_(needs_grad)
    parts = torch.arange(len(x)) % NUM_CHUNKS
    engine = one_process_engine(
        module, partition=parts, method=METHODS["drift"], self_check=False, cuda_graphs=captured
    )
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    found = []
    for step in range(NUM_STEPS):
        change(step, module)
        # The captured order is that of the step before; later ones differ.
        engine.set_step(step_index=max(step, 2))
        engine.controls.is_exact = step == EXACT
        engine.controls.records_staleness = step == RECORDED
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mixed):
            output = engine.forward((x, edges), {})
        (output**2).sum().backward()
        engine.controls.reset()
        found += [output.detach(), *(one.grad for one in module.parameters())]
        found += [one.clone() for one in module.buffers()]
        optimizer.step()
    trained = engine.graphs.trained
    assert trained is not None
    assert {trained.store.save(key)["step"] for key in trained.store} == {NUM_STEPS - 1}
    return [*found, *([x.grad] if needs_grad else [])]


def both(module: nn.Module, **options: Any) -> tuple[int, int]:
    """Train captured and eagerly, and compare; return the numbers of captures and replays."""
    torch.manual_seed(0)
    other = copy.deepcopy(module).to(DEVICE)
    eager = train(other, captured=False, **options)
    torch.manual_seed(0)
    with cuda_graphs() as counts:
        found = train(module.to(DEVICE), captured=True, **options)
    torch.testing.assert_close(found, eager, rtol=1e-12, atol=1e-12)
    return counts.captures.value, counts.replays.value


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gcn-layer": (lambda: gnn.GCNConv(D, D), lambda: nn.LayerNorm(D)),
    "gcn-batch": (lambda: gnn.GCNConv(D, D), lambda: nn.BatchNorm1d(D)),
    "sage-graph": (lambda: gnn.SAGEConv(D, D), lambda: gnn.GraphNorm(D)),
    "gat-layer": (lambda: gnn.GATConv(D, D), lambda: nn.LayerNorm(D)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_graphs_compute_what_eager_code_does(name: str) -> None:
    captures, replays = both(net(*LAYERS[name]), needs_grad=name == "gat-layer")
    if DEVICE.type == "cpu":
        num_eager = 2 + 2  # the first exact and pipelined step, EXACT, RECORDED
        assert captures == 2 * NUM_CHUNKS
        assert replays == 2 * NUM_CHUNKS * (NUM_STEPS - num_eager)


def test_graphs_cast_weights_as_autocast_does() -> None:
    both(net(*LAYERS["sage-graph"]).float(), mixed=True)


def test_without_graphs_on_the_device_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    if DEVICE.type == "cpu":
        train(net(*LAYERS["gcn-layer"]), captured=True)
        assert caplog.messages.count("cuda_graphs=True has no effect on cpu.") == 1


def test_they_ask_for_no_chunks() -> None:
    """On one stage "auto" is one exact chunk, unless an option asks for several."""
    given = {"num_chunks": "auto", "cuda_graphs": True}
    assert RunOptions(StrategyOptions(**given), num_stages=1).graph_chunks == 1
    asked = StrategyOptions(**given, partition="contiguous")
    assert RunOptions(asked, num_stages=1).graph_chunks > 1


@pytest.mark.parametrize("often", [False, True])
def test_weights_that_move_are_captured_anew(often: bool, caplog: pytest.LogCaptureFixture) -> None:
    def move(step: int, module: nn.Module) -> None:
        if often or step == 4:
            for one in module.parameters():
                one.data = one.data.clone()

    captures, _ = both(net(*LAYERS["gcn-batch"]), change=move)
    assert ("The last 5 steps ran without CUDA graphs" in caplog.text) == often
    assert DEVICE.type == "cuda" or captures == (0 if often else 4 * NUM_CHUNKS)


class Waiting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().abs().max())


class _WaitingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * float(grad.abs().max() > 0)


class WaitingBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = cast(Any, _WaitingBack).apply(x)
        return waited


@pytest.mark.parametrize("kind", [Waiting, WaitingBack])
def test_a_layer_that_waits_runs_eagerly(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    def norm() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(D), kind())

    captures, _ = both(net(LAYERS["gcn-batch"][0], norm))
    texts = [one.getMessage() for one in caplog.records if "CUDA graphs" in one.getMessage()]
    assert len(texts) == 1
    assert "cannot be captured" in texts[0]
    if kind is Waiting and DEVICE.type == "cpu":
        assert captures == 0
        assert "since layer 0 (" in texts[0]


@pytest.mark.parametrize("name", ["gat_jk", "batch_norm", "gcnii"])
def test_graphs_of_stages_read_what_they_receive(name: str, tmp_path: Path) -> None:
    case = communities(5)

    def fit(*, captured: bool) -> FitResult:
        return run_fit(
            ReferenceModule(name, optimizer="adam", lr=0.01, dropout=0.5),
            case.data,
            num_stages=2,
            num_chunks=case.num_chunks,
            partition=case.partition,
            max_epochs=6,
            tmp_path=tmp_path,
            strategy_kwargs={"cuda_graphs": captured},
        )

    eager = fit(captured=False)
    with cuda_graphs() as counts:
        found = fit(captured=True)
    assert_steps_equal(found.steps, eager.steps)
    if DEVICE.type == "cpu":
        assert counts.captures.value == 2 * 2 * case.num_chunks
        assert counts.replays.value == 2 * 2 * case.num_chunks * (6 - 2)
