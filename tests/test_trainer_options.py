"""What a Trainer can be told, and what users do with one: on stages the same comes out."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup
from tests.helpers.cases import covering, slow
from tests.helpers.realistic import Realistic, realistic_graph
from tests.helpers.trainers import (
    assert_same,
    datamodule,
    double_precision,
    make_module,
    make_trainer,
    start_method,
    weights,
)


@pytest.fixture(autouse=True)
def double() -> Any:
    with double_precision():
        yield


def first(items: list[Any]) -> Any:
    return items[0]


def loader(num_batches: int = 1) -> DataLoader:
    return DataLoader([realistic_graph()] * num_batches, collate_fn=first)


def metrics_of(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fast_dev_run": lambda _: {"fast_dev_run": True},
    "overfit_batches": lambda _: {"overfit_batches": 1},
    "barebones": lambda _: {"barebones": True},
    "limits": lambda _: {"limit_train_batches": 2, "limit_val_batches": 0, "max_steps": 3},
    "max_time": lambda _: {"max_time": "00:00:10:00", "callbacks": [Timer(interval="epoch")]},
    "simple profiler": lambda _: {"profiler": "simple"},
    "pytorch profiler": lambda folder: {
        "profiler": PyTorchProfiler(folder, "p", export_to_chrome=False),
        "max_epochs": 1,
    },
    "detect_anomaly": lambda _: {"detect_anomaly": True},
    "accumulate": lambda _: {"accumulate_grad_batches": 3},
    "accumulate by epoch": lambda _: {"callbacks": [GradientAccumulationScheduler({0: 1, 2: 3})]},
    "clip by value": lambda _: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clip by norm": lambda _: {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"},
    "val_check_interval": lambda _: {"val_check_interval": 2, "num_sanity_val_steps": 0},
    "check_val_every_n_epoch": lambda _: {"check_val_every_n_epoch": 2},
}


@pytest.mark.parametrize(("name", "num_stages"), covering(OPTIONS, [2, 1, 3]))
def test_options_of_the_trainer(name: str, num_stages: int, tmp_path: Path) -> None:
    def fit(num_stages: int) -> tuple[L.LightningModule, dict[str, float], int]:
        module, options = make_module(scheduler="step"), OPTIONS[name](tmp_path)
        callbacks = options.pop("callbacks", [])
        trainer = make_trainer(num_stages, 3, *callbacks, **options)
        trainer.fit(module, loader(3), loader(2))
        return module, metrics_of(trainer), trainer.global_step

    plain, metrics, num_steps = fit(0)
    ours, found, found_steps = fit(num_stages)
    assert_same(ours, plain)
    assert found == pytest.approx(metrics, abs=1e-6)
    if num_stages == 1:  # forked processes keep it
        assert found_steps == num_steps
    assert not torch.equal(weights(plain), weights(make_module()))


class Collects(Realistic):
    """Keeps outputs until the epoch ends, and takes batches with several graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []

    def training_step(self, batch: dict[str, Data], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": super().training_step(batch["a"], batch_idx), "y": batch["b"].y}

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.logits.append(self(data))

    def on_validation_epoch_end(self) -> None:
        self.log("spread", torch.stack(self.logits).std(), sync_dist=True)
        self.log("sum", self.logits[0].sum(), sync_dist=True, reduce_fx="sum")
        self.logits.clear()


class SumsOutputs(L.Callback):
    """Reads what training_step returned."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any
    ) -> None:
        pl_module.log("seen", outputs["loss"] * outputs["y"].sum())


def test_outputs_of_an_epoch_and_several_loaders() -> None:
    def fit(num_stages: int) -> tuple[L.LightningModule, dict[str, float]]:
        L.seed_everything(1, verbose=False)
        module = Collects()
        trainer = make_trainer(num_stages, 3, SumsOutputs())
        trainer.fit(module, {"a": loader(2), "b": loader(2)}, loader(2))
        return module, metrics_of(trainer)

    plain, metrics = fit(0)
    assert {"spread", "sum", "seen"} <= metrics.keys()
    for num_stages in (1, 2, 3):
        ours, found = fit(num_stages)
        assert_same(ours, plain)
        assert found == pytest.approx(metrics, abs=1e-6)


@pytest.mark.slow
def test_compiled_layers() -> None:
    def fit(num_stages: int) -> L.LightningModule:
        module = make_module()
        module.net.shared.compile(backend="eager")
        make_trainer(num_stages, 2).fit(module, datamodule=datamodule())
        return module

    plain = fit(0)
    for num_stages in (1, 2):  # compiling takes seconds
        assert_same(fit(num_stages), plain)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_compiled_module_is_refused(num_stages: int) -> None:
    with pytest.raises(RuntimeError, match="compil"):
        make_trainer(num_stages, 1).fit(torch.compile(make_module()), datamodule=datamodule())


def test_logged_rates_and_losses(tmp_path: Path) -> None:
    def fit(num_stages: int) -> list[dict[str, str]]:
        logger = CSVLogger(tmp_path, name=str(num_stages))
        trainer = make_trainer(
            num_stages, 4, LearningRateMonitor(), logger=logger, log_every_n_steps=1
        )
        trainer.fit(make_module(scheduler="step"), datamodule=datamodule())
        with (tmp_path / str(num_stages) / "version_0" / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    expected = fit(0)
    assert "lr-Adam/pg2" in expected[0]
    for num_stages in (1, 2, 3):
        found = fit(num_stages)
        for ours, plain in zip(found, expected, strict=True):
            assert {k: v and float(v) for k, v in ours.items()} == pytest.approx(
                {k: v and float(v) for k, v in plain.items()}, abs=1e-6
            )


class WritesPredictions(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch")
        self.folder = folder

    def write_on_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, prediction: Any, *args: Any
    ) -> None:
        torch.save(prediction, self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_predictions_are_whole_on_every_rank(num_stages: int, tmp_path: Path) -> None:
    [expected] = make_trainer(0, 1).predict(make_module(), datamodule=datamodule())
    trainer = make_trainer(num_stages, 1, WritesPredictions(tmp_path))
    trainer.predict(make_module(), datamodule=datamodule(), return_predictions=False)
    for rank in range(num_stages):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)


class HasRate(Realistic):
    """Its rate can be searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def searching_trainer(num_stages: int, folder: Path, *callbacks: L.Callback) -> L.Trainer:
    """The search runs without the other callbacks: one chunk, so that all steps are exact."""
    strategy = GNNPipeStrategy(num_chunks=1, start_method=start_method()) if num_stages else "auto"
    return make_trainer(num_stages, 3, *callbacks, strategy=strategy, default_root_dir=folder)


class SavesCurve(LearningRateFinder):
    """Writes what it found, in the process that found it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(num_training_steps=40, max_lr=0.5)
        self.folder = folder

    def lr_find(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().lr_find(trainer, pl_module)
        torch.save(self.optimal_lr.results, self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize("num_stages", [slow(1), 2, slow(3)])
def test_the_search_for_a_rate_equals_plain_lightning(num_stages: int, tmp_path: Path) -> None:
    """Its curve, and training from the first weights afterwards, with the rate that it found."""

    def fit(num_stages: int) -> tuple[L.LightningModule, list[dict[str, list[float]]]]:
        L.seed_everything(1, verbose=False)
        folder, module = tmp_path / str(num_stages), HasRate()
        folder.mkdir()
        trainer = searching_trainer(num_stages, folder, SavesCurve(folder))
        trainer.fit(module, loader(20))
        return module, [torch.load(path) for path in sorted(folder.glob("*.pt"))]

    plain, [curve] = fit(0)
    assert len(curve["loss"]) == 40
    ours, curves = fit(num_stages)
    assert len(curves) == num_stages
    for found in curves:
        assert found["lr"] == pytest.approx(curve["lr"], abs=1e-12)
        assert found["loss"] == pytest.approx(curve["loss"], abs=1e-9)
    torch.testing.assert_close(weights(ours), weights(plain), rtol=0, atol=1e-8)
    assert list(tmp_path.rglob(".lr_find*")) == []


class RecordsExactness(L.Callback):
    """Absent from the search, which runs with callbacks of its own."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.found.append(trainer.strategy.collect_stats().is_exact)


def test_no_row_of_the_search_is_read_in_training(tmp_path: Path) -> None:
    records = RecordsExactness()
    finder = LearningRateFinder(num_training_steps=10)
    strategy = GNNPipeStrategy(num_chunks=4)
    trainer = make_trainer(1, 3, finder, records, strategy=strategy, default_root_dir=tmp_path)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, StalenessWarmup)]
    trainer.fit(HasRate(), datamodule=datamodule())
    assert records.found == [True, False, False]


def script(num_stages: int, folder: Path) -> dict[str, Any]:
    """What a user's script may do with one Trainer after another; returns what came out."""
    module = make_module(scheduler="step")
    best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_last=True)
    trainer = make_trainer(num_stages, 2, best)
    trainer.fit(module, datamodule=datamodule())
    found: dict[str, Any] = {"after the first fit": weights(module)}
    found["validate"] = trainer.validate(module, datamodule=datamodule(), verbose=False)
    found["predict"] = trainer.predict(module, datamodule=datamodule())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=datamodule())
    found["after the second fit"] = weights(module)
    found["best"] = trainer.test(datamodule=datamodule(), ckpt_path="best", verbose=False)
    found["best file"] = Path(best.best_model_path).name
    trainer.save_checkpoint(folder / "after.ckpt")
    found["checkpoint"] = torch.load(folder / "after.ckpt", weights_only=True)["state_dict"]
    L.seed_everything(1, verbose=False)
    module = HasRate()
    finder = Tuner(searching_trainer(num_stages, folder)).lr_find(
        module, loader(20), num_training=40, max_lr=0.5
    )
    found["rate"], found["losses"] = finder.suggestion(), finder.results["loss"]
    found["rate of the module"], found["weights as they were"] = module.lr, weights(module)
    return found


def run_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """Run the script as torchrun does."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
    names |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    with double_precision():
        torch.save(script(num_ranks, folder), folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_stages", [slow(1), 2, slow(3)])
def test_a_script_of_many_runs_equals_plain_lightning(num_stages: int, tmp_path: Path) -> None:
    """Two fits, all loops, the best checkpoint, one saved afterwards, the Tuner; on every rank."""
    for name in ("plain", "ours"):
        (tmp_path / name).mkdir()
    expected = script(0, tmp_path / "plain")
    if num_stages == 1:
        ranks = [script(1, tmp_path / "ours")]
    else:
        args = (num_stages, find_free_network_port(), tmp_path / "ours")
        mp.start_processes(run_rank, args, nprocs=num_stages, start_method="fork")
        ranks = [torch.load(tmp_path / "ours" / f"rank{rank}.pt") for rank in range(num_stages)]
    for found in ranks:
        assert found.pop("best file") == expected["best file"]
        for name, value in found.items():
            theirs = expected[name]
            torch.testing.assert_close(value, theirs, rtol=1e-8, atol=1e-6, msg=name)


def test_the_trainer_of_the_other_package_says_which_one_is_meant() -> None:
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=r"the Trainer of lightning\.pytorch, not of pyt"):
        other.Trainer(accelerator="cpu", strategy=GNNPipeStrategy())


@pytest.mark.filterwarnings("error:.*smaller than the logging interval")
def test_one_step_an_epoch_is_no_mistake_of_the_logging_interval(tmp_path: Path) -> None:
    trainer = make_trainer(1, 1, logger=CSVLogger(tmp_path))
    trainer.fit(make_module(), datamodule=datamodule())
