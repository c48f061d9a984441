"""What works in a plain Trainer works here: metrics, callbacks, schedulers, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as PyGDataLoader

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.staleness import StalenessMethod
from lightning_gnnpipe.types import OrderName, StalenessName
from tests.helpers.cases import covering, slow
from tests.helpers.realistic import Realistic, TiedNet, realistic_graph
from tests.helpers.trainers import (
    assert_same,
    datamodule,
    double_precision,
    make_module,
    make_trainer,
    weights,
)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with double_precision():
        yield


FITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plateau": ({"scheduler": "plateau"}, {"gradient_clip_val": 0.1}),
    "step": ({"scheduler": "step"}, {"accumulate_grad_batches": 2}),
    "manual": ({"is_manual": True}, {}),
}


@pytest.mark.parametrize(("num_stages", "name"), covering([1, 2, 3], FITS))
def test_fit_equals_plain_lightning(num_stages: int, name: str) -> None:
    """Weights outside of the net, tied ones, metrics, schedulers, clipping, manual steps."""
    module_args, trainer_args = FITS[name]
    plain, ours = make_module(**module_args), make_module(**module_args)
    expected = make_trainer(0, 5, **trainer_args)
    expected.fit(plain, datamodule=datamodule())
    found = make_trainer(num_stages, 5, **trainer_args)
    found.fit(ours, datamodule=datamodule())
    assert_same(ours, plain)
    assert found.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        torch.testing.assert_close(found.callback_metrics[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [(2, 1), slow(1, 2), slow(2, 3), (2, 0), (0, 2)])
def test_p6_a_checkpoint_goes_on_under_any_number_of_stages(
    first: int, second: int, tmp_path: Path
) -> None:
    plain = make_module(scheduler="step")
    make_trainer(0, 6).fit(plain, datamodule=datamodule())
    saver = ModelCheckpoint(tmp_path, save_last=True, monitor="val_loss")
    make_trainer(first, 3, saver).fit(make_module(scheduler="step"), datamodule=datamodule())
    resumed = make_module(scheduler="step")
    with torch.no_grad():
        for p in resumed.parameters():
            p.zero_()
    make_trainer(second, 6).fit(
        resumed, datamodule=datamodule(), ckpt_path=str(tmp_path / "last.ckpt")
    )
    assert_same(resumed, plain)


def test_p6_a_resumed_run_saves_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    """A rank that resumes reads the states of all stages, and must not write old ones back."""
    saver = ModelCheckpoint(tmp_path / "a", save_last=True, monitor="val_loss")
    make_trainer(2, 2, saver).fit(make_module(), datamodule=datamodule())
    again = ModelCheckpoint(tmp_path / "b", save_last=True, monitor="val_loss")
    make_trainer(2, 4, again).fit(
        make_module(), datamodule=datamodule(), ckpt_path=str(tmp_path / "a" / "last.ckpt")
    )
    stock = ModelCheckpoint(tmp_path / "plain", save_last=True, monitor="val_loss")
    make_trainer(0, 4, stock).fit(make_module(), datamodule=datamodule())
    found = torch.load(tmp_path / "b" / "last.ckpt", weights_only=True)
    expected = torch.load(tmp_path / "plain" / "last.ckpt", weights_only=True)
    for name in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


class Annealed(TiedNet):
    """Reads an attribute of its own, options of the LightningModule, and the rank."""

    def __init__(self, owner: L.LightningModule) -> None:
        super().__init__()
        self._factor, self.owner = 1.0, [owner]

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().forward(*args, **kwargs)
        factor = self._factor * self.owner[0].hparams["factor"]
        factor = factor if self.owner[0].global_rank >= 0 else 0.0
        return {"h": found["h"] * factor, "both": found["both"]}


class Anneals(Realistic):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"factor": 1.0})
        self.net = Annealed(self)

    def on_train_epoch_start(self) -> None:
        self.net.strength = 1.0 / (1 + self.current_epoch)
        self.net._factor = 1.0 + (self.current_epoch > 1)
        self.hparams["factor"] = 0.5 + (self.current_epoch > 2)


@pytest.mark.parametrize("num_stages", [slow(1), 2])
def test_an_attribute_that_changes_is_read_each_step(num_stages: int) -> None:
    def fit(num_stages: int) -> L.LightningModule:
        L.seed_everything(1, verbose=False)
        module = Anneals()
        make_trainer(num_stages, 4).fit(module, datamodule=datamodule())
        return module

    assert_same(fit(num_stages), fit(0))


@pytest.mark.parametrize("name", ["current_epoch", "trainer", "log"])
def test_a_forward_that_reads_the_progress_is_refused(name: str) -> None:
    class Reads(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.conv = gnn.SAGEConv(5, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            assert getattr(self, name) is not None
            return self.conv(x, edge_index)

        def training_step(self, data: Data, batch_idx: int) -> Tensor:
            return self(data.x, data.edge_index).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ValueError, match=rf"got self.{name}.*Log in training_step"):
        make_trainer(1, 1).fit(Reads(), datamodule=datamodule())


def test_random_numbers_of_the_training_step_equal_plain_lightning() -> None:
    class Drops(Realistic):
        def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
            data.x = torch.nn.functional.dropout(data.x, 0.1)
            return super().training_step(data, batch_idx)

    def fit(num_stages: int) -> L.LightningModule:
        L.seed_everything(1, verbose=False)
        module = Drops()
        make_trainer(num_stages, 3).fit(module, datamodule=datamodule())
        return module

    assert_same(fit(2), fit(0))


def test_metrics_and_plugins_are_given_back() -> None:
    module = make_module()
    before = module.accuracy.distributed_available_fn
    trainer = make_trainer(1, 1)
    trainer.fit(module, datamodule=datamodule())
    assert module.accuracy.distributed_available_fn is before
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)


def test_p6_a_checkpoint_is_a_stock_one(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True, monitor="val_loss")
    ours = make_module()
    make_trainer(2, 3, saver).fit(ours, datamodule=datamodule())
    stock = ModelCheckpoint(tmp_path / "plain", save_last=True, monitor="val_loss")
    make_trainer(0, 3, stock).fit(make_module(), datamodule=datamodule())
    found = torch.load(tmp_path / "last.ckpt", weights_only=True)
    expected = torch.load(tmp_path / "plain" / "last.ckpt", weights_only=True)
    assert found.keys() - expected.keys() == {"gnnpipe"}  # of which plain Lightning takes no notice
    assert expected.keys() <= found.keys()
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=1e-10)
    ours_state, plain_state = found["optimizer_states"][0], expected["optimizer_states"][0]
    torch.testing.assert_close(ours_state["state"], plain_state["state"], rtol=0, atol=1e-10)
    assert ours_state["param_groups"] == plain_state["param_groups"]
    loaded = Realistic.load_from_checkpoint(tmp_path / "last.ckpt")
    assert_same(loaded, ours)


def test_callbacks_and_loggers_agree_with_plain_lightning(tmp_path: Path) -> None:
    def fit(num_stages: int) -> tuple[int, str, list[str], int]:
        folder = tmp_path / str(num_stages)
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}-{val_loss:.6f}")
        trainer = make_trainer(
            num_stages,
            20,
            stop,
            best,
            logger=[CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tb")],
            log_every_n_steps=1,
        )
        trainer.fit(make_module(), datamodule=datamodule())
        lines = (folder / "csv/version_0/metrics.csv").read_text().splitlines()
        events = len(list((folder / "tb").rglob("events*")))
        return len(lines), Path(best.best_model_path).name, sorted(lines[0].split(",")), events

    assert fit(2) == fit(0)


def test_all_loops_equal_plain_lightning(tmp_path: Path) -> None:
    plain, ours = make_module(), make_module()
    trainer = make_trainer(0, 2)
    trainer.fit(plain, datamodule=datamodule())
    expected = trainer.validate(plain, datamodule=datamodule(), verbose=False)
    expected += trainer.test(plain, datamodule=datamodule(), verbose=False)
    predicted = trainer.predict(plain, datamodule=datamodule())
    trainer = make_trainer(1, 2)
    trainer.fit(ours, datamodule=datamodule())
    found = trainer.validate(ours, datamodule=datamodule(), verbose=False)
    found += trainer.test(ours, datamodule=datamodule(), verbose=False)
    for ours_one, plain_one in zip(found, expected, strict=True):
        assert ours_one == pytest.approx(plain_one, abs=1e-6)
    torch.testing.assert_close(trainer.predict(ours, datamodule=datamodule()), predicted)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(ours, datamodule=datamodule())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()


def test_test_and_validate_run_on_two_stages() -> None:
    plain = make_module()
    [expected] = make_trainer(0, 1).test(plain, datamodule=datamodule(), verbose=False)
    [found] = make_trainer(2, 1).test(make_module(), datamodule=datamodule(), verbose=False)
    assert found == pytest.approx(expected, abs=1e-6)
    [expected] = make_trainer(0, 1).validate(plain, datamodule=datamodule(), verbose=False)
    [found] = make_trainer(2, 1).validate(make_module(), datamodule=datamodule(), verbose=False)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_ordinary_loaders_work(num_stages: int) -> None:
    plain = make_module()
    make_trainer(0, 3).fit(plain, datamodule=datamodule())
    data = realistic_graph()
    ours = make_module()
    make_trainer(num_stages, 3).fit(ours, DataLoader([data], collate_fn=lambda items: items[0]))
    assert_same(ours, plain)
    ours = make_module()
    make_trainer(num_stages, 3).fit(ours, PyGDataLoader([data]), PyGDataLoader([data]))
    assert_same(ours, plain)


def test_a_fit_without_a_seed_agrees_on_all_ranks() -> None:
    torch.manual_seed(7)
    module = Realistic()
    trainer = make_trainer(2, 2, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=datamodule())
    assert torch.isfinite(weights(module)).all()


def test_the_module_is_left_as_it_was() -> None:
    module = make_module()
    names = [name for name, _ in module.named_parameters()]
    before = set(module.net.__dict__)
    make_trainer(1, 1).fit(module, datamodule=datamodule())
    assert [name for name, _ in module.named_parameters()] == names
    assert set(module.net.__dict__) == before


def test_the_strategy_is_registered() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="gnnpipe", logger=False)
    assert isinstance(trainer.strategy, GNNPipeStrategy)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="gnnpipe_fork", logger=False)
    assert trainer.strategy.options.start_method == "fork"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_chunks": 0}, r"'num_chunks' to be between 1 and the number of nodes.*got 0"),
        ({"num_stages": -1}, "'num_stages' to be between 1"),
        ({"partition": "meetis"}, "'partition' to be one of metis, random, contiguous"),
        ({"balance": "fair"}, "'balance' to be one of"),
        ({"start_method": "thread"}, "'start_method' to be one of"),
        ({"history_dtype": torch.int64}, "'history_dtype' to be a floating-point dtype"),
        ({"repeat_encoder": "always"}, "'repeat_encoder' to be True, False or 'auto'"),
        ({"repeat_encoder": 1}, "'repeat_encoder' to be True, False or 'auto'"),
        ({"history_device": "gpu"}, "'history_device' to be a device with memory"),
        ({"history_device": "meta"}, "'history_device' to be a device with memory"),
        ({"chunk_order": True}, "'chunk_order' to be one of shuffled, fixed"),
        ({"staleness": "fresh"}, "to be one of drift, constant, gnnpipe .*'fresh'"),
        ({"staleness": 2.0}, "'staleness' to be one of drift, constant, gnnpipe"),
        ({"staleness": "blocks"}, "got 'blocks'.*Leave 'staleness' out"),
        ({"staleness": StalenessMethod()}, "'staleness' to be one of drift, constant, gnnpipe"),
        ({"staleness": "lookahead"}, "got 'lookahead'.*its default, 'drift', takes its place"),
        ({"chunk_order": "mirrored"}, "got 'mirrored'.*Write 'shuffled'"),
        ({"halo_codec": ("fp16", "drive")}, "Write 'bf16', .* Write 'int1'"),
        ({"cut_codec": "int4"}, "one of fp32, bf16, int8, int1, .*got 'int4'.*Write 'int8'"),
        ({"graph_parallel": "auto"}, "got 'auto'.*run `gnnpipe plan --num_devices N`"),
        ({"graph_parallel": 0}, "'graph_parallel' to be at least 1"),
        ({"graph_parallel": 2, "history_device": "cpu"}, "'history_device' to be None"),
        ({"timeout": 10}, "'timeout' to be a positive datetime.timedelta"),
        (
            {"halo_codec": "int3"},
            "'halo_codec' to be one of fp32, .*, or a pair of them.*got 'int3'",
        ),
        ({"cut_codec": ("bf16",)}, r"'cut_codec' to be one of .*got \('bf16',\)"),
        ({"cut_codec": ("bf16", "bf17")}, r"'cut_codec' to be one of .*got \('bf16', 'bf17'\)"),
        ({"halo_codec": ("int1",) * 3}, "'halo_codec' to be one of"),
        ({"halo_codec": None}, "'halo_codec' to be one of"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GNNPipeStrategy(**options)


@pytest.mark.parametrize(
    ("order", "staleness", "is_told"),
    [("fixed", "gnnpipe", True), ("fixed", "drift", True), ("fixed", "constant", False)],
)
def test_a_fixed_order_with_a_factor_on_gradients_is_told(
    order: OrderName,
    staleness: StalenessName,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = GNNPipeStrategy(num_chunks=2, chunk_order=order, staleness=staleness)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    with caplog.at_level(logging.WARNING):
        trainer.fit(make_module(), datamodule=datamodule())
    assert ("chunk_order='fixed' with a factor of 2 on gradients" in caplog.text) == is_told
