"""The benchmark of staleness' parts: each against a reference by autograd over a dense graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import erdos_renyi_graph

from lightning_gnnpipe.models import GCNII
from tests.helpers.scripts import modules_of

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks" / "staleness_parts"
NUM_NODES, NUM_CHUNKS = 40, 4


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The benchmark's module."""
    with modules_of(FOLDER, ("main",)) as found:
        yield found["main"]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def training(benchmark: ModuleType) -> Any:
    """Makes a training of a part, with a rate of 0 and without dropout, on a directed graph."""

    def make(part: str) -> Any:
        torch.manual_seed(0)
        edges = erdos_renyi_graph(NUM_NODES, 0.15, directed=True)
        data = Data(x=torch.randn(NUM_NODES, 5), edge_index=edges, y=torch.arange(NUM_NODES) % 3)
        for name in ("train_mask", "val_mask", "test_mask"):
            data[name] = torch.arange(NUM_NODES) % 2 == 0
        net = GCNII(5, 6, 3, num_layers=4, dropout=0.0)
        chunk = torch.randperm(NUM_NODES) % NUM_CHUNKS
        return benchmark.Training(
            net,
            benchmark.Graph(data, chunk),
            data,
            benchmark.PARTS[part],
            torch.optim.SGD(net.parameters(), lr=0.0),
        )

    return make


def gradient_of(training: Any) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in training.net.parameters()])


def exact_gradient(training: Any) -> Tensor:
    """That of the plain model."""
    data, mask = training.data, training.data.train_mask
    training.optimizer.zero_grad()
    loss = F.cross_entropy(training.net(data.x, data.edge_index)[mask], data.y[mask])
    loss.backward()
    return gradient_of(training)


def test_an_exact_step_is_that_of_the_plain_model(benchmark: ModuleType, training: Any) -> None:
    run = training("both, predicted")
    run.step(None)
    found = gradient_of(run).clone()
    torch.testing.assert_close(found, exact_gradient(run), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "part",
    [
        "exact",
        "stale rows",
        "stale rows, gradients of other masks",
        "stale rows, exact gradients a step late",
    ],
)
def test_unbiased_parts_are_exact_where_weights_stand_still(part: str, training: Any) -> None:
    run = training(part)
    for order in (None, torch.arange(NUM_CHUNKS), torch.tensor([2, 0, 3, 1])):
        run.step(None if order is None else run.graph.edges(order))
        run.accuracies()
    found = gradient_of(run).clone()
    torch.testing.assert_close(found, exact_gradient(run), rtol=1e-10, atol=1e-12)


def test_late_gradients_become_exact_once_all_paths_are_there(training: Any) -> None:
    run = training("late gradients, delayed")
    run.step(None)
    edges = run.graph.edges(torch.arange(NUM_CHUNKS))
    run.step(edges)
    first = gradient_of(run).clone()
    for _step in range(4):  # one for each layer
        run.step(edges)
    found, exact = gradient_of(run).clone(), exact_gradient(run)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    assert (first - exact).norm() > 1e-3 * exact.norm()


def test_factors_are_those_of_edges_by_the_order(training: Any) -> None:
    """`stale rows, factors 0.5 and 1.5` against autograd with such factors on a dense graph."""
    run = training("stale rows, factors 0.5 and 1.5")
    run.accuracies()
    order = torch.tensor([2, 0, 3, 1])
    run.step(run.graph.edges(order))
    found = gradient_of(run).clone()

    whole = run.graph.whole.to_dense()
    place = order.argsort()[run.graph._chunk]
    target, source = place[:, None], place[None, :]
    factors = 1.0 + 0.5 * (source < target).double() - 0.5 * (source > target).double()
    run.optimizer.zero_grad()
    x = x_0 = run.net.lin_in(run.data.x).relu()
    for conv in run.net.convs:
        passed = (whole * factors) @ x
        mixed = passed + (whole @ x - passed).detach()
        mixed = (1 - conv.alpha) * mixed + conv.alpha * x_0
        x = ((1 - conv.beta) * mixed + conv.beta * mixed @ conv.weight1).relu()
    mask = run.data.train_mask
    F.cross_entropy(run.net.lin_out(x)[mask], run.data.y[mask]).backward()
    torch.testing.assert_close(found, gradient_of(run), rtol=1e-10, atol=1e-12)


def test_a_late_gradient_is_carried_forward(benchmark: ModuleType) -> None:
    part = benchmark.Part(False, "late", 0.5, 1.5, 0.5)
    layer = benchmark.Layer(late=torch.tensor([3.0]))
    grad = torch.tensor([9.0])
    assert benchmark.late_gradient(part, layer, grad) == 3.0
    layer.before = torch.tensor([1.0])
    assert benchmark.late_gradient(part, layer, grad) == 4.0


def test_stale_rows_are_those_of_validation_with_some_dropout(benchmark: ModuleType) -> None:
    layer = benchmark.Layer(validated=torch.tensor([1.0]))
    assert layer.stale_rows == 1.0
    layer.noise = torch.tensor([10.0])
    assert layer.stale_rows == 8.0


def test_a_run_says_how_it_ends_and_when_it_reached_a_target(benchmark: ModuleType) -> None:
    run = benchmark.Run(best=80.0, curve=[0.0] * 10 + [70.0] * 19 + [75.0])
    assert (run.late, run.fall) == (70.25, 10.0)
    assert run.epochs_to(70.0) == 15
    assert run.epochs_to(14.0) == 11  # the mean of 0, 0, 0, 0, 70
    assert run.epochs_to(71.5) == float("inf")


def test_the_table_has_a_line_for_each_part(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["main", "--dataset", "digits", "--epochs", "2", "--seeds", "0", "--parts"]
    monkeypatch.setattr("sys.argv", [*options, "exact", "both, predicted"])
    torch.set_default_dtype(torch.float32)
    benchmark.main()
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "exact" in line or "both" in line
    ]
    assert len(lines) == 2
