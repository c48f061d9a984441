"""What a Trainer can be told, and what users do with one: on stages the same comes out."""

from __future__ import annotations

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
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup
from tests.helpers.cases import covering, slow
from tests.helpers.realistic import Realistic, realistic_graph
from tests.helpers.record import StatsRecorder
from tests.helpers.trainers import (
    assert_same,
    datamodule,
    double_precision,
    make_module,
    make_trainer,
    start_method,
    weights,
)
from tests.test_strategy import assert_as_plain, first, fit, metrics_of, stepping

pytestmark = pytest.mark.usefixtures("double")


def loader(num_batches: int = 1) -> DataLoader:
    return DataLoader([realistic_graph()] * num_batches, collate_fn=first)


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


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("name", "num_stages"), covering(OPTIONS, [2, 1, 3]))
def test_options_of_the_trainer(name: str, num_stages: int, tmp_path: Path) -> None:
    def run(num_stages: int) -> tuple[L.LightningModule, L.Trainer]:
        options = OPTIONS[name](tmp_path)
        callbacks, epochs = options.pop("callbacks", []), options.pop("max_epochs", 3)
        loaders = loader(3), loader(2)
        return fit(num_stages, stepping, *callbacks, epochs=epochs, data=loaders, **options)

    (plain, expected), (ours, found) = run(0), run(num_stages)
    assert_same(ours, plain)
    assert metrics_of(found) == pytest.approx(metrics_of(expected), abs=1e-6)
    if num_stages == 1:  # forked processes keep it
        assert found.global_step == expected.global_step
    assert not torch.equal(weights(plain), weights(make_module()))


def test_a_validation_by_the_clock_is_refused_on_several_devices() -> None:
    options = {"check_val_every_n_epoch": None, "val_check_interval": "00:00:00:30"}
    with pytest.raises(
        mp.ProcessRaisedException, match=r"a number of batches(.|\n)*val_check_interval=n"
    ):
        fit(2, **options)
    fit(1, **options)


def test_each_fit_draws_masks_of_its_own() -> None:
    """As a plain Trainer does; a seed repeats them, whenever it is set."""

    def losses(*seeds: int | None) -> list[float]:
        found = []
        for seed in seeds:
            if seed is not None:
                torch.manual_seed(seed)
            trainer = make_trainer(1, 1, num_sanity_val_steps=0)
            module = Drops()
            trainer.fit(module, datamodule=datamodule())
            found.append(module.found)
        return found

    L.seed_everything(1, verbose=False)
    first, second, third, again = losses(None, None, 5, 5)
    assert len({first, second, third}) == 3 and third == again


class Drops(Realistic):
    """Has equal weights in each fit, and keeps what its training step returns."""

    def __init__(self) -> None:
        super().__init__()
        for weight in self.parameters():
            weight.data = torch.linspace(-1, 1, weight.numel()).view_as(weight)
        self.net.norm = torch.nn.Dropout(0.5)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = super().training_step(data, batch_idx)
        self.found = float(loss.detach())
        return loss


class ReturnsAll(Realistic):
    """Optimizes by itself, and returns more than a loss."""

    def __init__(self) -> None:
        super().__init__(is_manual=True)

    def training_step(self, data: Data, batch_idx: int) -> Any:
        loss = super().training_step(data, batch_idx)
        return {"loss": torch.stack([loss.detach(), loss.detach() / 2])}


def test_a_step_that_optimizes_by_itself_returns_what_it_likes() -> None:
    assert_as_plain(1, ReturnsAll)


class Holds(Realistic):
    """Buffers that gloo cannot send."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("short", torch.ones(3, dtype=torch.int16))
        self.register_buffer("adj", torch.eye(3).to_sparse_csr())


def test_buffers_of_any_kind() -> None:
    assert_as_plain(2, Holds)


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


@pytest.mark.parametrize("num_stages", [1, 2, slow(3)])
def test_outputs_of_an_epoch_and_several_loaders(num_stages: int) -> None:
    data = {"a": loader(2), "b": loader(2)}, loader(2)
    logged = assert_as_plain(num_stages, Collects, SumsOutputs(), data=data)
    assert {"spread", "sum", "seen"} <= logged.keys()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_compiled_module_is_refused(num_stages: int) -> None:
    with pytest.raises(RuntimeError, match="compil"):
        fit(num_stages, lambda: torch.compile(make_module()))


class HasRate(Realistic):
    """Its rate can be searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def test_no_row_of_the_search_is_read_in_training(tmp_path: Path) -> None:
    kinds, finder = StatsRecorder(), LearningRateFinder(num_training_steps=10)
    strategy = GNNPipeStrategy(num_chunks=4)
    trainer = make_trainer(1, 3, finder, kinds, strategy=strategy, default_root_dir=tmp_path)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, StalenessWarmup)]
    trainer.fit(HasRate(), datamodule=datamodule())
    assert kinds.was_exact == [True, False, False]


def script(num_stages: int, folder: Path) -> dict[str, Any]:
    """What a user's script may do with one Trainer after another; returns what came out."""
    module = make_module(scheduler="step")
    best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_last=True)
    sizes: list[int] = []  # when a fit begins: the last may have left a stage of the module only
    summary = LambdaCallback(
        on_fit_start=lambda _, one: sizes.append(summarize(one).total_parameters)
    )
    trainer = make_trainer(num_stages, 2, best, summary)
    trainer.fit(module, datamodule=datamodule())
    found: dict[str, Any] = {"after the first fit": weights(module), "sizes": sizes}
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
    # The search runs without callbacks: one chunk, so that all steps are exact.
    strategy = GNNPipeStrategy(num_chunks=1, start_method=start_method()) if num_stages else "auto"
    trainer = make_trainer(num_stages, 3, strategy=strategy, default_root_dir=folder)
    finder = Tuner(trainer).lr_find(module, loader(20), num_training=40, max_lr=0.5)
    found["rate"], found["losses"] = finder.suggestion(), finder.results["loss"]
    found["rate of the module"], found["weights as they were"] = module.lr, weights(module)
    trainer.fit(module, loader(20))
    found["with this rate"], found["files"] = weights(module), len(list(folder.rglob(".lr_f*")))
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
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-9)
        for name, value in found.items():
            theirs = expected[name]
            torch.testing.assert_close(value, theirs, rtol=1e-8, atol=1e-6, msg=name)


def test_the_trainer_of_the_other_package_says_which_one_is_meant() -> None:
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=r"the Trainer of lightning\.pytorch, not of pyt"):
        other.Trainer(accelerator="cpu", strategy=GNNPipeStrategy())
