"""What works in a plain Trainer works here: metrics, callbacks, schedulers, checkpoints."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch_geometric.loader import DataLoader as PyGDataLoader

from lightning_gnnpipe import GNNPipeStrategy
from tests.helpers.cases import covering, slow
from tests.helpers.realistic import Realistic, realistic_graph
from tests.helpers.trainers import assert_same, datamodule, make_module, make_trainer

pytestmark = pytest.mark.usefixtures("double")
Make = Callable[[], L.LightningModule]


def fit(
    num_stages: int,
    make: Make = make_module,
    *callbacks: L.Callback,
    epochs: int = 3,
    data: Any = (),
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[Any, L.Trainer]:
    """Train, plainly with 0 stages."""
    L.seed_everything(1, verbose=False)
    module, trainer = make(), make_trainer(num_stages, epochs, *callbacks, **options)
    trainer.fit(module, *(data or [datamodule()]), ckpt_path=ckpt_path)
    return module, trainer


def metrics_of(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_as_plain(
    num_stages: int, make: Make, *callbacks: L.Callback, **options: Any
) -> dict[str, float]:
    """Compare the weights and what was logged, and return that."""
    (plain, expected), (ours, found) = (
        fit(number, make, *callbacks, **options) for number in (0, num_stages)
    )
    assert_same(ours, plain)
    assert metrics_of(found) == pytest.approx(metrics_of(expected), abs=1e-6)
    return metrics_of(expected)


FITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plateau": ({"scheduler": "plateau"}, {"gradient_clip_val": 0.1}),
    "step": ({"scheduler": "step"}, {"accumulate_grad_batches": 2}),
    "manual": ({"is_manual": True}, {}),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("num_stages", "name"), covering([1, 2, 3], FITS))
def test_fit_equals_plain_lightning(num_stages: int, name: str) -> None:
    """Weights outside of the net, tied ones, metrics, schedulers, clipping, manual steps."""
    module_args, trainer_args = FITS[name]
    assert_as_plain(num_stages, lambda: Realistic(**module_args), epochs=5, **trainer_args)


def stepping(scale: float = 1.0) -> Realistic:
    module = Realistic(scheduler="step")
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(scale)
    return module


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_last=True, monitor="val_loss")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("first", "second"), [(2, 3), (2, 0), (0, 2)])
def test_p6_a_checkpoint_goes_on_under_any_stages(first: int, second: int, tmp_path: Path) -> None:
    plain, _ = fit(0, stepping, epochs=6)
    fit(first, stepping, saver(tmp_path))
    path = tmp_path / "last.ckpt"
    assert_same(fit(second, lambda: stepping(0.0), epochs=6, ckpt_path=path)[0], plain)


def test_modules_and_metrics_are_given_back() -> None:
    module = make_module()
    names = [name for name, _ in module.named_parameters()]
    before, sync = set(module.net.__dict__), module.accuracy.distributed_available_fn
    fit(1, lambda: module, epochs=1)
    assert [name for name, _ in module.named_parameters()] == names
    assert set(module.net.__dict__) == before
    assert module.accuracy.distributed_available_fn is sync


def test_p6_a_checkpoint_is_a_stock_one(tmp_path: Path) -> None:
    ours, _ = fit(2, make_module, saver(tmp_path))
    fit(0, make_module, saver(tmp_path / "plain"))
    found, expected = (
        torch.load(folder / "last.ckpt", weights_only=True)
        for folder in (tmp_path, tmp_path / "plain")
    )
    assert found.keys() - expected.keys() == {"gnnpipe"}  # of which plain Lightning takes no notice
    assert expected.keys() <= found.keys()
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=1e-10)
    ours_state, plain_state = found["optimizer_states"][0], expected["optimizer_states"][0]
    torch.testing.assert_close(ours_state["state"], plain_state["state"], rtol=0, atol=1e-10)
    assert ours_state["param_groups"] == plain_state["param_groups"]
    assert_same(Realistic.load_from_checkpoint(tmp_path / "last.ckpt"), ours)


def test_callbacks_and_loggers_agree_with_plain_lightning(tmp_path: Path) -> None:
    def results(num_stages: int) -> tuple[list[dict[str, Any]], str, int]:
        folder = tmp_path / str(num_stages)
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}-{val_loss:.6f}")
        loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tb")]
        callbacks, options = (stop, best, LearningRateMonitor()), {"log_every_n_steps": 1}
        fit(num_stages, stepping, *callbacks, epochs=20, logger=loggers, **options)
        with (folder / "csv/version_0/metrics.csv").open() as file:
            rows = [{k: v and float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        return rows, Path(best.best_model_path).name, len(list((folder / "tb").rglob("events*")))

    (found, *others), (expected, *plain_others) = results(2), results(0)
    assert "lr-Adam/pg2" in expected[0] and others == plain_others
    for ours, plain in zip(found, expected, strict=True):
        assert ours == pytest.approx(plain, abs=1e-6)


def test_a_test_alone_runs_on_two_stages() -> None:
    [expected], [found] = (
        make_trainer(number, 1).test(make_module(), datamodule=datamodule(), verbose=False)
        for number in (0, 2)
    )
    assert found == pytest.approx(expected, abs=1e-6)


def first(items: list[Any]) -> Any:
    return items[0]


@pytest.mark.parametrize("num_stages", [1, slow(2)])
def test_a_loader_of_pyg_works(num_stages: int) -> None:
    """Of batches that are one graph."""
    loaders = [PyGDataLoader([realistic_graph()])] * 2
    assert_same(fit(num_stages, data=loaders)[0], fit(0)[0])


def test_the_strategy_is_registered() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="gnnpipe", logger=False)
    assert isinstance(trainer.strategy, GNNPipeStrategy)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="gnnpipe_fork", logger=False)
    assert trainer.strategy.options.start_method == "fork"
