"""P10: a history row is read only by a pass that was given what the row was made of.

The weights stay as they are, so that a stale row equals a fresh one if both are made of the same
input. Then a pipelined forward equals the plain one; rows of another input would show.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.engine import known_graphs as known_inputs
from lightning_gnnpipe.staleness import METHODS
from lightning_gnnpipe.trainer.processes import random_number
from tests.helpers.engines import one_process_engine
from tests.helpers.observed import make_data, make_module, make_trainer

N, WIDTH = 24, 3
EDGES = torch.stack([torch.arange(72) % N, (torch.arange(72) * 5 + 1) % N])
CHUNKS = torch.arange(N) % 4
LABELS = torch.arange(N) % 2
pytestmark = pytest.mark.usefixtures("double")


class Net(nn.Module):
    """Three layers that read options of the call and of the module, and a buffer."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(gnn.SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("factor", torch.ones(WIDTH))
        self.slope = 1.0

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        weight: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if weight is not None:
            x = x * weight
        for conv in self.convs:
            x = (scale * self.slope * conv(x, edge_index) * self.factor).tanh()
        return x


class Owner(nn.Module):
    """The user's module around the pipelined one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([net, TABLE, LABEL_TABLE, ENCODER])
        self.rng, self.choice = RNG, 0


class Steps:
    """Training passes of an engine beside the plain module."""

    def __init__(self, **options: Any) -> None:
        self.net, self.plain = Net(), Net()
        self.engine: PipelineEngine = one_process_engine(self.net, partition=CHUNKS, **options)
        self.engine.attach()
        self.owner = Owner(self.net)
        self.begin()

    def begin(self) -> None:
        """Say that a step begins."""
        number = partial(random_number, torch.device("cpu"))
        self.engine.identity.begin_step(self.owner, number)

    def run(self, *args: Any, **kwargs: Any) -> bool:
        """Run one step; return whether it was exact, and refuse any other output than plain."""
        self.plain.load_state_dict(self.net.state_dict())
        self.plain.slope = self.net.slope
        expected = self.plain(*args, **kwargs)
        output = self.net(*args, **kwargs)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        output.sum().backward()
        self.begin()
        return self.was_exact

    @property
    def was_exact(self) -> bool:
        assert self.engine.last_step.record is not None
        return self.engine.last_step.record.is_exact


def features(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, WIDTH, generator=generator, dtype=torch.float64)


def by_numpy(x: Tensor) -> None:
    array = x.numpy()
    array *= 2


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "by data": lambda x: x.data.mul_(2),
    "by numpy": by_numpy,
    "in place": lambda x: x[3].add_(1),
}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", WRITES)
def test_features_that_are_written_to_are_another_input(kind: str) -> None:
    steps, x = Steps(), features(0)
    assert [steps.run(x, EDGES) for _ in range(2)] == [True, False]
    WRITES[kind](x)
    assert steps.run(x, EDGES)


X = [features(seed) for seed in range(3)]
SAME_AGAIN: dict[str, tuple[Callable[[int], tuple[Any, ...]], list[bool]]] = {
    "three inputs, each with rows of its own": (
        lambda step: (X[step % 3], EDGES),
        [True, True, True] + [False] * 6,
    ),
    "two graphs": (
        lambda step: (X[0], (EDGES, EDGES.roll(1, dims=0))[step % 2]),
        [True, True, False, False],
    ),
    "copies": (lambda step: (features(0), EDGES.clone()), [True, False, False, False]),
    "an argument that no layer reads": (
        lambda step: (X[0], EDGES, None, torch.rand(N) < 0.5),
        [True, False, False],
    ),
}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", SAME_AGAIN)
def test_inputs_that_come_again_are_pipelined(kind: str) -> None:
    steps, (arguments, exact) = Steps(), SAME_AGAIN[kind]
    assert [steps.run(*arguments(step)) for step in range(len(exact))] == exact


TABLE = nn.Embedding(N, WIDTH, dtype=torch.float64)
LABEL_TABLE = nn.Embedding(3, WIDTH, dtype=torch.float64)
ENCODER = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


RNG = np.random.default_rng(0)


NEW_EACH_STEP: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + torch.rand(N, WIDTH),
    "dropout": lambda x: F.dropout(x, 0.5),
    "known labels": lambda x: x + F.one_hot(LABELS, WIDTH) * (torch.rand(N, 1) < 0.5),
    "encoder after noise": lambda x: ENCODER(x + torch.rand(N, WIDTH)),
    "dropout after encoder": lambda x: F.dropout(ENCODER(x), 0.5),
    "label embedding": lambda x: (
        ENCODER(x) + LABEL_TABLE(torch.where(torch.rand(N) < 0.5, LABELS, 2))
    ),
    "masked": lambda x: ENCODER(x).masked_fill(torch.rand(N, 1) < 0.5, 0.0),
    "noise beside weights": lambda x: TABLE.weight + torch.rand(N, WIDTH),
    "random rows of a table": lambda x: TABLE(torch.randint(N, (N,))),
    "a generator of the user's module": lambda x: ENCODER(x + torch.from_numpy(RNG.random((N, 1)))),
}


@pytest.mark.some_cases(7)
@pytest.mark.parametrize("kind", NEW_EACH_STEP)
def test_an_input_that_is_new_in_each_step_runs_exactly(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(known_inputs, "_MOST_KEPT", 2)
    steps, x = Steps(), features(0)
    caplog.set_level(logging.WARNING)
    torch.manual_seed(1)
    assert all(steps.run(NEW_EACH_STEP[kind](x), EDGES) for _ in range(2))
    assert "ran exactly" not in caplog.text
    assert all(steps.run(NEW_EACH_STEP[kind](x), EDGES) for _ in range(3))
    found = [one for one in caplog.messages if "training steps ran exactly" in one]
    assert len(found) == 1 and found[0].startswith("3 of 3 ") and "because 'x' of" in found[0]
    assert len(steps.engine.graphs.inputs.kept) == 2


@pytest.mark.parametrize(("num_epochs", "is_told"), [(1, True), (2, False)])
def test_a_run_says_at_its_end_if_most_graphs_were_new(
    num_epochs: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = []
    for seed in range(3):
        graphs.append(make_data().data)
        torch.manual_seed(seed)
        graphs[-1].edge_index = torch.randint(0, graphs[-1].num_nodes, (2, 120))
    trainer = make_trainer(1, 3, max_epochs=num_epochs, limit_val_batches=0)
    trainer.fit(make_module(), DataLoader(graphs, batch_size=None))
    found = [one for one in caplog.messages if "training steps ran exactly" in one]
    assert len(found) == is_told
    for one in found:
        assert one.startswith("3 of 3 ") and "'edge_index'" in one and "partitioned anew" in one


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "encoder": lambda x: ENCODER(x).relu(),
    "table": lambda x: TABLE.weight,
    "rows of a table": lambda x: TABLE(torch.arange(N)),
    "joined": lambda x: torch.cat([ENCODER(x)[:, :1], TABLE.weight[:, 1:]], dim=1),
    "beside features": lambda x: TABLE.weight + x,
    "norms": lambda x: F.layer_norm(F.batch_norm(ENCODER(x), None, None, training=True), (WIDTH,)),
}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", COMPUTED)
def test_what_trained_weights_compute_of_the_same_data_is_the_same_input(kind: str) -> None:
    steps, x = Steps(), features(0)
    assert [steps.run(COMPUTED[kind](x), EDGES) for _ in range(3)] == [True, False, False]
    with torch.no_grad():
        ENCODER.weight += 0.01
        TABLE.weight += 0.01
    steps.net(COMPUTED[kind](x), EDGES).sum().backward()  # now with stale rows
    assert not steps.was_exact


def test_what_trained_weights_compute_counts_as_its_batch_and_the_state_of_the_module() -> None:
    """Also a choice that the module makes by a number of its own."""
    steps = Steps()

    def run(batch: int) -> bool:
        steps.engine.set_step(batch=X[batch])
        return steps.run(ENCODER(X[batch]), EDGES)

    assert [run(batch) for batch in (0, 1, 0, 1, 0, 1)] == [True, True, *[False] * 4]
    steps.owner.choice = 1
    assert [steps.run(ENCODER(X[2]), EDGES) for _ in range(2)] == [True, False]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", ["weight", "scale", "factor", "slope", "layer"])
def test_all_that_a_forward_reads_is_part_of_the_input(name: str) -> None:
    steps, x = Steps(), features(0)
    given: dict[str, Any] = {"weight": torch.ones(N, 1), "scale": 1.0}
    assert [steps.run(x, EDGES, **given) for _ in range(2)] == [True, False]
    if name == "factor":
        steps.net.factor.mul_(0.5)
    elif name == "layer":
        steps.net.convs[1].normalize = steps.plain.convs[1].normalize = True
    elif name == "slope":
        steps.net.slope = 0.5
    else:
        given[name] = given[name] * 0.5
    assert [steps.run(x, EDGES, **given) for _ in range(2)] == [True, False]


class DropsInTraining(Net):
    """Reads an option in training only."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        if self.training:
            x = F.dropout(x, 0.1 * self.slope)
        return super().forward(x, edge_index)


def test_validation_is_given_what_training_is_although_it_reads_less() -> None:
    net = DropsInTraining()
    engine = one_process_engine(net, partition=CHUNKS, method=METHODS["drift"])
    engine.attach()
    for _ in range(2):
        engine.set_step(caller="training")
        net.train()(features(0), EDGES).sum().backward()
        with torch.no_grad(), engine.called_by("evaluation"):
            engine.controls.takes_validation = True
            net.eval()(features(0), EDGES)
        (own,) = engine.graphs.inputs.kept.values()
        assert own.is_renewed


@pytest.mark.parametrize("bound", ["_MOST_KEPT", "_MOST_BYTES"])
def test_beyond_the_bound_the_least_recently_used_input_goes(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 7 * N * WIDTH * 8  # of three layers, their gradients, and the permuted input
    monkeypatch.setattr(known_inputs, bound, 2 if bound == "_MOST_KEPT" else 2 * num_bytes)
    steps = Steps()
    exact = {name: steps.run(X[int(name[0])], EDGES) for name in ("0", "1", "0 again", "2")}
    assert exact == {"0": True, "1": True, "0 again": False, "2": True}
    assert [steps.run(X[number], EDGES) for number in (0, 2, 1)] == [False, False, True]
    assert len(steps.engine.graphs.inputs.kept) == 2
