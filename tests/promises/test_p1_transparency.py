"""P1: without staleness, training on any number of stages equals plain PyG on one device."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import EmbeddingRefresh, FullGraphDataModule, StalenessWarmup
from tests.helpers.cases import covering, name_of
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import (
    FitResult,
    assert_shared_out,
    assert_transparent,
    run_fit,
    run_plain,
)
from tests.helpers.modules import NETS, NORMED_NETS, ReferenceModule

NUM_STEPS = 5

# name: (options of the module, options of the trainer, how often an epoch yields the graph)
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "momentum": ({"optimizer": "momentum"}, {}, 1),
    "adam": ({"optimizer": "adam", "lr": 0.01}, {}, 1),
    "decay": ({"optimizer": "adam", "lr": 0.01, "weight_decay": 0.05}, {}, 1),
    "clip": ({}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"}, 1),
    "accumulate": ({}, {"accumulate_grad_batches": 2}, 2),
    "all": (
        {"optimizer": "momentum", "weight_decay": 0.05},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "limit_val_batches": 1.0},
        2,
    ),
}


def fit_both(
    name: str, setting: str, tmp_path: Path, case: GraphCase | None = None, **piped: Any
) -> tuple[FitResult, FitResult]:
    case = case or communities(5)
    module_options, trainer_options, batches_per_epoch = SETTINGS[setting]
    shared: dict[str, Any] = {
        "max_epochs": NUM_STEPS,
        "tmp_path": tmp_path,
        "batches_per_epoch": batches_per_epoch,
        "trainer_kwargs": trainer_options,
    }
    plain = run_plain(ReferenceModule(name, **module_options), case.data, **shared)
    found = run_fit(
        ReferenceModule(name, **module_options),
        case.data,
        num_chunks=case.num_chunks,
        partition=case.partition,
        **{"num_stages": 1, "callbacks": [StalenessWarmup(NUM_STEPS)], **shared, **piped},
    )
    return found, plain


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("case", "name"), covering(all_cases(), ["gcn", "edge"]), ids=name_of)
def test_one_stage_equals_plain_lightning_on(case: GraphCase, name: str, tmp_path: Path) -> None:
    assert_transparent(*fit_both(name, "momentum", tmp_path, case))


@pytest.mark.some_cases(4)
@pytest.mark.parametrize(
    ("name", "setting", "num_stages", "num_shards"),
    [
        *covering(NETS, SETTINGS, [1], [1]),
        # every model and every setting on two stages, on three, and with shards
        *(
            (name, setting, *where)
            for where in [(2, 1), (3, 1), (2, 2)]
            for name, setting in zip(cycle(NETS), SETTINGS, strict=False)
        ),
        ("gat_jk", "clip", 1, 3),
    ],
)
def test_stages_and_shards_equal_plain_lightning(
    name: str, setting: str, num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    where = {"num_stages": num_stages, "num_shards": num_shards}
    piped, plain = fit_both(name, setting, tmp_path, **where)
    assert_transparent(piped, plain)
    if num_stages > 1:
        assert_shared_out(piped, plain)


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", [*NETS, *NORMED_NETS])
def test_exact_passes_in_chunks_equal_plain_lightning(
    name: str, num_stages: int, tmp_path: Path
) -> None:
    options = {"num_stages": num_stages, "strategy_kwargs": {"exact_in_chunks": True}}
    piped, plain = fit_both(name, "all", tmp_path, **options)
    assert_transparent(piped, plain)


@pytest.mark.parametrize(
    ("name", "num_stages", "strategy"),
    [
        ("gcnii", 2, {"weights": "staged", "recompute": True}),
        ("gcnii", 2, {"repeat_encoder": True}),
        ("batch_norm", 1, {"recompute": True}),
    ],
)
def test_exact_passes_in_chunks_beside_other_options(
    name: str, num_stages: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """On one stage all steps are exact, without a warm-up, and refreshes find nothing stale."""
    callbacks = [EmbeddingRefresh(1), *[StalenessWarmup(NUM_STEPS)] * (num_stages - 1)]
    options = {"num_stages": num_stages, "callbacks": callbacks}
    options["strategy_kwargs"] = {"exact_in_chunks": True, **strategy}
    assert_transparent(*fit_both(name, "all", tmp_path, **options))


class ComplexModule(ReferenceModule):
    """A complex value crosses the cut; two complex outputs, of which the loss reads one."""

    def __init__(self) -> None:
        super().__init__("gcn")
        self.net = ComplexNet(self.net)

    def loss(self, outputs: Tensor, data: Data) -> Tensor:
        return super().loss(outputs[0].abs() + outputs[0].angle().sin(), data)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = self.loss(self(data), data)
        self.outputs = loss.detach()
        self.log("train_loss", loss, batch_size=1)
        return loss


class ComplexNet(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.convs = net.convs

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        first = self.convs[0](x, edge_index)
        turned = torch.polar(torch.ones_like(first), first)
        x = self.convs[2](self.convs[1](first.tanh(), edge_index).tanh(), edge_index) * turned.imag
        x = self.convs[3](x, edge_index)
        return x * turned.sum(-1, keepdim=True), turned


@pytest.mark.parametrize("num_stages", [1, 2])
def test_complex_values_and_outputs(num_stages: int, tmp_path: Path) -> None:
    data, warmup = communities(5).data, [StalenessWarmup(num_epochs=3)]
    shared: dict[str, Any] = {"max_epochs": 3, "tmp_path": tmp_path}
    where = {"num_stages": num_stages, "num_chunks": 5, "callbacks": warmup}
    piped = run_fit(ComplexModule(), data, **where, **shared)
    assert_transparent(piped, run_plain(ComplexModule(), data, **shared))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "strategy"),
    [
        ("gcn", 1, 1, {}),
        ("edge", 1, 1, {}),
        ("gat_jk", 2, 1, {}),
        ("gat_jk", 1, 1, {"exact_in_chunks": True}),
        ("gcn", 2, 1, {"exact_in_chunks": True}),
    ],
)
def test_evaluation_is_exact(
    name: str, num_stages: int, num_shards: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """Validation and prediction of a model trained in chunks equal plain PyG with its weights."""
    case, module, plain = communities(5), ReferenceModule(name), ReferenceModule(name)
    fit = run_fit(
        module,
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=case.num_chunks,
        partition=case.partition,
        max_epochs=NUM_STEPS,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 1.0},
        strategy_kwargs=strategy,
    )
    for step in fit.steps:
        plain.load_state_dict({**plain.state_dict(), **step.weights})
        with torch.no_grad():
            outputs = plain.eval()(case.data)
        expected = F.cross_entropy(outputs[case.data.val_mask], case.data.y[case.data.val_mask])
        torch.testing.assert_close(step.metrics["val_loss"], expected, rtol=1e-10, atol=1e-10)

    with torch.no_grad():  # outside the trainer the module is the plain model again
        torch.testing.assert_close(module.eval()(case.data), outputs, rtol=1e-10, atol=1e-10)
    if num_stages * num_shards == 1:  # Lightning returns no predictions from other processes
        datamodule = FullGraphDataModule(case.data)
        (predicted,) = fit.trainer.predict(module, datamodule=datamodule)
        torch.testing.assert_close(predicted, outputs, rtol=1e-10, atol=1e-10)
