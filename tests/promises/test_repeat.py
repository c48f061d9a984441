"""P1 and P3 where stages compute the encoder again rather than to receive it.

P2 stands in `test_p2_stale_gradient`, P5 in `test_p5_bytes`, P6 in `test_p6_resume`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import StalenessWarmup
from lightning_gnnpipe.types import RepeatOption
from tests.helpers.cases import slow
from tests.helpers.encoders import REPEATED, Encoded
from tests.helpers.graphs import communities
from tests.helpers.launch import FitResult, assert_transparent, run_fit, run_plain
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import assert_steps_equal

EPOCHS = 4


def fit(
    module: ReferenceModule,
    num_stages: int,
    *callbacks: L.Callback,
    repeat: RepeatOption = True,
    data: Data | None = None,
    recompute: bool = False,
    **options: Any,
) -> FitResult:
    case = communities(5)
    return run_fit(
        module,
        data or case.data,
        num_stages=num_stages,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=callbacks,
        max_epochs=EPOCHS,
        strategy_kwargs={"repeat_encoder": repeat, "recompute": recompute},
        **options,
    )


def assert_exact(
    make: Callable[[], ReferenceModule],
    num_stages: int,
    tmp_path: Path,
    *callbacks: L.Callback,
    data: Data | None = None,
    repeat: RepeatOption = "auto",
    **trainer: Any,
) -> FitResult:
    """Return an exact run on stages, which equals plain Lightning; `trainer`: options of it."""
    data, warmup = data or communities(5).data, StalenessWarmup(num_epochs=EPOCHS)
    shared: dict[str, Any] = {"tmp_path": tmp_path, "trainer_kwargs": trainer}
    plain = run_plain(make(), data, callbacks=callbacks, max_epochs=EPOCHS, **shared)
    found = fit(make(), num_stages, *callbacks, warmup, repeat=repeat, data=data, **shared)
    assert_transparent(found, plain)
    return found


def adam(name: str, dropout: float = 0.0) -> ReferenceModule:
    return ReferenceModule(name, optimizer="adam", lr=0.01, dropout=dropout)


def assert_encoder_on(ranks: Iterable[int], fitted: FitResult, name: str = "") -> None:
    """These ranks compute the encoder in the last step."""
    word, called = "net.lins.0" if name == "pyg" else "net.lin_in", fitted.steps[-1].called
    assert [rank for rank, names in enumerate(called) if word in names] == list(ranks)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("name", "num_stages", "repeat"),
    [
        ("encoded", 2, True),
        ("two", 3, False),
        ("frozen", 3, True),
        ("behind", 2, True),
        ("pyg", 2, "auto"),
        slow("edge_encoded", 3, "auto"),
    ],
)
def test_p1_stages_equal_plain_lightning(
    name: str, num_stages: int, repeat: RepeatOption, tmp_path: Path
) -> None:
    """With clipping by the norm of all gradients, in which shared ones count once."""
    clip: dict[str, Any] = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"}
    found = assert_exact(lambda: adam(name), num_stages, tmp_path, repeat=repeat, **clip)
    assert_encoder_on(range(num_stages if name in REPEATED and repeat else 1), found, name)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["encoded", "two", "pyg", "behind"])
def test_p3_dropout_is_the_same_on_any_number_of_stages(name: str, tmp_path: Path) -> None:
    one = fit(adam(name, 0.5), 1, tmp_path=tmp_path)
    ways: list[tuple[int, dict[str, Any]]] = [(3, {}), (2, {"recompute": True})]
    if name == "encoded":
        ways.append((3, {"repeat": False}))
    for num_stages, options in ways:
        many = fit(adam(name, 0.5), num_stages, tmp_path=tmp_path, **options)
        is_repeated = name in REPEATED and "repeat" not in options
        assert_encoder_on(range(num_stages if is_repeated else 1), many, name)
        torch.testing.assert_close(many.losses, one.losses, rtol=1e-12, atol=1e-12)
        assert_transparent(many, one)


@pytest.mark.parametrize("name", ["encoded", slow("two")])
def test_p3_dropout_is_the_same_with_shards(name: str, tmp_path: Path) -> None:
    """Shards draw other masks than one device does, but any number of stages the same."""
    shared: dict[str, Any] = {"tmp_path": tmp_path, "num_shards": 2}
    many = fit(adam(name, 0.5), 2, **shared)
    assert_steps_equal(many.steps, fit(adam(name, 0.5), 1, **shared).steps)
    assert_encoder_on(range(4), many)


class Unfreezing(L.Callback):
    """Trains the encoder in the first epoch and from the third on."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        module.net.lin_in.requires_grad_(trainer.current_epoch != 1)


@pytest.mark.parametrize("width", [5, 64])
def test_an_encoder_that_is_frozen_for_a_while(width: int, tmp_path: Path) -> None:
    """To repeat the wide one pays while it is frozen alone."""
    data = communities(5).data.clone()
    data.x = torch.sin(torch.arange(24 * width, dtype=torch.float64)).view(24, width)

    def make() -> ReferenceModule:
        module = ReferenceModule("encoded", optimizer="momentum")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            module.net.lin_in = nn.Linear(width, 6).double()
        return module

    found = assert_exact(make, 2, tmp_path, Unfreezing(), data=data)
    assert_encoder_on([0, 1] if width == 5 else [0], found)
    encoder, weights = (  # with a number for each weight: whether it has a gradient
        sum(p.numel() + 1 for p in one.parameters()) * 8 for one in (make().net.lin_in, make().net)
    )
    first, frozen, *_ = found.steps
    assert first.bytes["weight_grad"] == weights + (encoder if width == 5 else 0)
    assert frozen.bytes["weight_grad"] == weights - encoder


class Outside(ReferenceModule):
    """Has a layer in front of the pipelined module, so that the batch needs a gradient."""

    def __init__(self) -> None:
        super().__init__("encoded", optimizer="adam", lr=0.01)
        torch.manual_seed(1)
        self.first = nn.Linear(5, 5).double()

    def net_inputs(self, data: Data) -> list[Tensor]:
        x, edge_index = super().net_inputs(data)
        return [self.first(x), edge_index]


def test_a_batch_that_needs_a_gradient_gets_those_of_all_stages(tmp_path: Path) -> None:
    assert_encoder_on([0, 1, 2], assert_exact(Outside, 3, tmp_path))


class Sometimes(Encoded):
    uses_encoder = True

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.uses_encoder:
            return super().encode(x)
        h = x[:, :1].expand(-1, 6) * 1.0
        return h, h


class Idle(ReferenceModule):
    """Uses its encoder in every other step."""

    def __init__(self) -> None:
        super().__init__("encoded", optimizer="momentum", weight_decay=0.05)
        net = Sometimes().double()
        net.load_state_dict(self.net.state_dict())
        self.net = net

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        self.net.uses_encoder = self.trainer.current_epoch % 2 == 0
        return super().training_step(data, batch_idx)


def test_a_weight_of_several_stages_without_use_has_no_gradient(tmp_path: Path) -> None:
    """It would decay otherwise, as plain Lightning's does not."""
    found = assert_exact(Idle, 2, tmp_path)
    assert all("net.lin_in.weight" not in step.gradients for step in found.steps[1::2])


@pytest.mark.parametrize(("name", "is_warned"), [("behind", True), ("encoded", False)])
def test_a_wish_that_cannot_be_met_is_logged(name: str, is_warned: bool, tmp_path: Path) -> None:
    """Once, by the first rank."""
    log, handler = logging.getLogger("lightning_gnnpipe"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        fit(adam(name), 2, tmp_path=tmp_path)
    finally:
        log.removeHandler(handler)
        handler.close()
    text = (tmp_path / "log").read_text()
    assert text.count("repeat_encoder=True has no effect") == is_warned
