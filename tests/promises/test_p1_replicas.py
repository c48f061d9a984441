"""P1 on a data axis: replicas of the pipeline train as one device does on all of their batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torchmetrics import CatMetric, MeanSquaredError

from tests.helpers.batches import (
    NUM_EDGE_FEATURES,
    NUM_FEATURES,
    NUM_TARGETS,
    WIDTH,
    GraphModule,
    draw_batch,
)
from tests.helpers.launch import SEED, FitResult, fit_batches
from tests.helpers.record import StatsRecorder, Step, assert_steps_equal

SIZES = (4, 7, 1, 9, 5, 6, 3, 8, 5, 4, 6, 2, 3, 5, 7, 1, 2, 6, 4)
"""Graphs to train on. They are odd in number: of two replicas, one has one of the other's."""
NUM_VALIDATED = 12
BATCH = 4
REPLICAS = 2
EPOCHS = 2
ACCUMULATED = 2
CLIP = 0.05
FLOAT64 = 8


class Tied(nn.Module):
    """The same linear layer behind each conv, so that several stages use it; one has no use."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_FEATURES, WIDTH)
        self.convs = nn.ModuleList(
            gnn.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=NUM_EDGE_FEATURES) for _ in range(3)
        )
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, 1)
        self.lin_out = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        x = self.lin_in(x)
        for conv in self.convs:
            x = x + self.mix(conv(x, data.edge_index, data.edge_attr)).tanh()
        return self.lin_out(gnn.global_mean_pool(x, data.batch, data.num_graphs))


class Surrounded(GraphModule):
    """Weights in front of the pipelined module and behind it, and every way to log."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            super().__init__(net=Tied())
            self.lift = nn.Linear(NUM_FEATURES, NUM_FEATURES).double()
            self.head = nn.Linear(NUM_TARGETS, NUM_TARGETS).double()
        self.error = MeanSquaredError().set_dtype(torch.float64)
        self.kept = CatMetric()  # of single precision

    def forward(self, data: Batch) -> Tensor:
        return self.head(self.net(self.lift(data.x), data))

    def validation_step(self, data: Batch, batch_idx: int) -> None:
        out = self(data)
        self.error.update(out, data.y)
        self.kept.update(data.y[data.y[:, 0] > 0, 0])  # of each replica another number
        options: dict[str, Any] = {"sync_dist": True, "batch_size": data.num_graphs}
        self.log("val_loss", self.loss(out, data), **options)
        self.log("num_graphs", float(data.num_graphs), reduce_fx="sum", **options)
        self.log("error", self.error, batch_size=data.num_graphs)

    def on_validation_epoch_end(self) -> None:
        self.log("kept", self.kept.compute().double().sum())
        self.kept.reset()


def gather(trainer: L.Trainer, module: L.LightningModule) -> None:
    """What a user gathers comes from each replica once."""
    own = trainer.strategy.distributed_sampler_kwargs["rank"]
    assert module.all_gather(torch.tensor(own)).tolist() == list(range(REPLICAS))


def draw_graphs() -> list[Data]:
    return draw_batch(SIZES).to_data_list()


def train_on_union() -> tuple[list[list[Step]], Surrounded]:
    """Train on one device with the mean of the replicas' losses; return the steps of each."""
    module, graphs = Surrounded(), draw_graphs()
    optimizer = module.configure_optimizers()
    parameters = list(module.parameters())
    steps: list[list[Step]] = [[] for _ in range(REPLICAS)]
    samplers = [DistributedSampler(graphs, REPLICAS, rank, seed=SEED) for rank in range(REPLICAS)]
    for epoch in range(EPOCHS):
        orders = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        starts = range(0, len(orders[0]), BATCH)
        for number, start in enumerate(starts):
            parts = [_batch(graphs, order[start : start + BATCH]) for order in orders]
            outputs = [module(part) for part in parts]
            losses = [module.loss(out, part) for out, part in zip(outputs, parts, strict=True)]
            (sum(losses) / (REPLICAS * ACCUMULATED)).backward()  # type: ignore[union-attr]
            gradients: dict[str, Tensor] = {}
            if (number + 1) % ACCUMULATED == 0 or start == starts[-1]:
                named = module.named_parameters()
                gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
                nn.utils.clip_grad_norm_(parameters, CLIP)
                optimizer.step()
                optimizer.zero_grad()
            weights = {name: p.detach().clone() for name, p in module.named_parameters()}
            for own, out, loss in zip(steps, outputs, losses, strict=True):
                logged = {"train_loss": loss.detach()}
                given = out.detach().flatten(), loss.detach() / ACCUMULATED
                own.append(Step(*given, dict(gradients), weights, logged))
    return steps, module


def _batch(graphs: Sequence[Data], order: Sequence[int]) -> Batch:
    return Batch.from_data_list([graphs[i] for i in order])


def fit(num_stages: int, tmp_path: Path, *callbacks: L.Callback, **options: Any) -> FitResult:
    graphs = draw_graphs()
    return fit_batches(
        Surrounded(),
        DataLoader(graphs, batch_size=BATCH, shuffle=True),
        val_batches=DataLoader(graphs[:NUM_VALIDATED], batch_size=BATCH),
        num_stages=num_stages,
        num_replicas=REPLICAS,
        num_chunks=3,
        max_epochs=EPOCHS,
        tmp_path=tmp_path,
        callbacks=callbacks,
        trainer_kwargs={
            "limit_val_batches": 1.0,
            "accumulate_grad_batches": ACCUMULATED,
            "gradient_clip_val": CLIP,
            "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        },
        **options,
    )


def data_grad_bytes() -> int:
    """Return the bytes of a mean, with a number for each weight: there or None."""
    return 2 * (REPLICAS - 1) * sum(p.numel() + 1 for p in Surrounded().parameters()) * FLOAT64


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_replicas_equal_one_device_on_all_of_their_batches(num_stages: int, tmp_path: Path) -> None:
    """Gradients accumulate and are clipped; metrics, bytes, checkpoints; another run goes on."""
    saver = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_top_k=-1)
    callbacks = (saver, EarlyStopping("val_loss", patience=5), StatsRecorder(tmp_path))
    gathers = LambdaCallback(on_validation_epoch_end=gather)
    found = fit(num_stages, tmp_path, gathers, *callbacks)

    expected, module = train_on_union()
    for steps, own in zip([found.steps, *found.others], expected, strict=True):
        assert_steps_equal(steps, own)
        for step, other in zip(steps, found.steps, strict=True):  # the same bits
            assert all(torch.equal(step.weights[n], other.weights[n]) for n in step.weights)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(found.state_dict[name], value, rtol=1e-10, atol=1e-10)

    module.eval()
    whole = _batch(draw_graphs(), range(NUM_VALIDATED))
    error = module.loss(module(whole), whole).item()
    kept = whole.y[whole.y[:, 0] > 0, 0].float().double().sum().item()
    expected_log = {"val_loss": error, "error": error, "kept": kept, "num_graphs": NUM_VALIDATED}
    logged = {name: found.trainer.callback_metrics[name].item() for name in expected_log}
    assert logged == pytest.approx(expected_log, rel=1e-10)

    counted = [step.get("data_grad", 0) for step in torch.load(tmp_path / "bytes.pt")]
    assert counted == EPOCHS * [0, data_grad_bytes(), data_grad_bytes()]

    path = tmp_path / "epoch=0.ckpt"
    resumed = fit(3 - num_stages, tmp_path, ckpt_path=path)
    for steps, own in zip([resumed.steps, *resumed.others], expected, strict=True):
        assert_steps_equal(steps, own[len(own) // EPOCHS :])

    ordered = DataLoader(draw_graphs(), batch_size=BATCH)
    shared: dict[str, Any] = {"tmp_path": tmp_path, "max_epochs": EPOCHS}
    alone = fit_batches(Surrounded(), ordered, num_stages=1, ckpt_path=path, **shared)
    plain = fit_batches(Surrounded(), ordered, ckpt_path=path, **shared)
    assert_steps_equal(alone.steps, plain.steps)
