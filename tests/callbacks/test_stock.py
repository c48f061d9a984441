"""Lightning's own callbacks, and torchmetrics' collections, all at once: as in a plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch_geometric.data import Data
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.helpers.realistic import Realistic
from tests.helpers.trainers import assert_same, datamodule, make_module, make_trainer

pytestmark = pytest.mark.usefixtures("double")
EPOCHS = 4


class Measured(Realistic):
    """Its layers are a backbone; logs a collection of metrics, a sum of two, and one by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net
        del self.net
        self.collection = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.both = MulticlassAccuracy(3) + MulticlassF1Score(3)
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.loose = {"number": SumMetric()}  # no submodule

    def forward(self, data: Data) -> Tensor:
        found = self.backbone(self.encode(data.x), data.edge_index, edge_attr=data.edge_attr)
        return self.head(found["h"]) * self.scale

    def step(self, data: Data, name: str) -> Tensor:
        logits, y = self(data)[data[f"{name}_mask"]], data.y[data[f"{name}_mask"]]
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.log_dict(self.collection(logits, y), batch_size=1)
        self.both(logits, y)
        self.log("both", self.both, on_epoch=True, batch_size=1)
        self.mean.update(loss.detach())
        self.loose["number"].update(len(y))
        self.log(f"{name}_loss", loss, batch_size=1)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.log("number", self.loose["number"].compute())
        self.mean.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


def log_norm(trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
    module.log("norm", torch.stack([p.detach().norm() for p in module.parameters()]).norm())


def callbacks(folder: Path) -> list[L.Callback]:
    return [
        stock.BackboneFinetuning(unfreeze_backbone_at_epoch=2),
        stock.GradientAccumulationScheduler({0: 1, 3: 2}),
        stock.LambdaCallback(on_train_batch_end=log_norm),
        stock.LearningRateMonitor(),
        stock.DeviceStatsMonitor(cpu_stats=True),
        stock.ThroughputMonitor(batch_size_fn=lambda batch: 60, window_size=2),
        stock.Timer(duration="00:00:10:00"),
        stock.EarlyStopping("val_loss", patience=EPOCHS),
        stock.OnExceptionCheckpoint(folder),
        stock.RichModelSummary(max_depth=3),
        stock.RichProgressBar(),
        SpikeDetection(warmup=1),
    ]


def fit(num_stages: int, folder: Path) -> tuple[L.LightningModule, list[dict[str, float]]]:
    """Return the module, and what each rank has logged at the end."""
    L.seed_everything(1, verbose=False)
    module = Measured()
    folder.mkdir()

    def keep(trainer: L.Trainer, _: L.LightningModule) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save(logged, folder / f"{trainer.global_rank}.pt")

    options = {"enable_progress_bar": True, "enable_model_summary": True}
    options |= {"enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = make_trainer(
        num_stages,
        EPOCHS,
        *callbacks(folder),
        stock.LambdaCallback(on_fit_end=keep),
        logger=CSVLogger(folder),
        **options,
    )
    trainer.fit(module, datamodule=datamodule())
    return module, [torch.load(path) for path in sorted(folder.glob("*.pt"))]


def test_all_at_once(tmp_path: Path) -> None:
    plain, [expected] = fit(0, tmp_path / "0")
    assert {"MulticlassAccuracy", "both_epoch", "mean", "number", "norm"} <= expected.keys()
    ours, ranks = fit(2, tmp_path / "2")
    for found in ranks:
        assert found == pytest.approx(expected, abs=1e-6)
    assert_same(ours, plain)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_pruning_prunes_the_layers_of_all_stages(num_stages: int) -> None:
    modules = []
    for number in (0, num_stages):
        modules.append(make_module())
        pruning = stock.ModelPruning("l1_unstructured", amount=0.3)
        make_trainer(number, 2, pruning).fit(modules[-1], datamodule=datamodule())
    plain, ours = modules
    assert_same(ours, plain)
    weights = [p for p in ours.net.parameters() if p.dim() == 2]
    assert sum(int((p == 0).sum()) for p in weights) > 0.2 * sum(p.numel() for p in weights)
