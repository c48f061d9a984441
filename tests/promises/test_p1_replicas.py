"""P1 on a data axis: replicas of the pipeline train as those of Lightning's DDP do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
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
from tests.helpers.cases import slow
from tests.helpers.launch import FitResult, fit_batches
from tests.helpers.record import StatsRecorder, Step, assert_steps_equal
from tests.test_strategy import metrics_of

SIZES = (4, 7, 1, 9, 5, 6, 3, 8, 5, 4, 6, 2, 3, 5, 7, 1, 2, 6, 4)
"""Graphs to train on. They are odd in number: of two replicas, one has one of the other's."""
BATCH, REPLICAS, EPOCHS = 4, 2, 2


class Tied(nn.Module):
    """The same linear layer behind each conv, so that several stages use it; one has no use."""

    def __init__(self, is_normed: bool) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_FEATURES, WIDTH)
        self.convs = nn.ModuleList(
            gnn.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=NUM_EDGE_FEATURES) for _ in range(3)
        )
        self.norm = gnn.BatchNorm(WIDTH) if is_normed else nn.Identity()
        self.mix, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.lin_out = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        x = self.norm(self.lin_in(x))
        for conv in self.convs:
            x = x + self.mix(conv(x, data.edge_index, data.edge_attr)).tanh()
        return self.lin_out(gnn.global_mean_pool(x, data.batch, data.num_graphs))


class Surrounded(GraphModule):
    """Weights in front of the pipelined module, a norm behind it, and every way to log."""

    def __init__(self, is_normed: bool = False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            super().__init__(net=Tied(is_normed))
            self.lift = nn.Linear(NUM_FEATURES, NUM_FEATURES).double()
        self.norm = nn.BatchNorm1d(NUM_TARGETS).double()
        self.error = MeanSquaredError().set_dtype(torch.float64)
        self.kept = CatMetric()  # of single precision

    def forward(self, data: Batch) -> Tensor:
        return self.norm(self.net(self.lift(data.x), data))

    def training_step(self, data: Batch, batch_idx: int) -> dict[str, Tensor]:
        found = super().training_step(data, batch_idx)
        self.log("synced", found["loss"].detach(), sync_dist=True, on_epoch=True, batch_size=3)
        self.log("most", data.num_graphs, sync_dist=True, reduce_fx="max", batch_size=1)
        return found

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


class GraphData(L.LightningDataModule):
    """The loaders, made anew in each process; graphs are changed at random if there `is_noise`.

    Args:
        num_workers: Of each rank, which change them. They are forked by a process without
            threads: a rank has those of gloo, and the fork of one might wait for ever.
    """

    def __init__(self, num_workers: int = 0, *, is_noise: bool = True) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"num_workers": num_workers}
        if num_workers:
            self.options |= {"multiprocessing_context": "forkserver", "persistent_workers": True}
        self.graphs, self.is_noise = draw_batch(SIZES).to_data_list(), is_noise

    def train_dataloader(self) -> DataLoader:
        graphs = Noisy(self.graphs) if self.is_noise else self.graphs
        return DataLoader(graphs, batch_size=BATCH, shuffle=True, **self.options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.graphs[:11], batch_size=2)  # one graph is validated on twice


class Noisy(list[Data]):
    """Adds noise to the features whenever a graph is read."""

    def __getitem__(self, index: Any) -> Any:
        graph = copy.copy(super().__getitem__(index))
        graph.x = graph.x + torch.randn_like(graph.x)
        return graph


def looks(folder: Path) -> L.Callback:
    """Writes the buffers that validation uses; what a user gathers comes from each replica once."""

    def save(trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        replica = trainer.strategy.distributed_sampler_kwargs["rank"]
        torch.save(dict(module.named_buffers()), folder / f"buffers_{replica}.pt")
        assert module.all_gather(torch.tensor(replica)).tolist() == list(range(REPLICAS))

    return LambdaCallback(on_validation_batch_start=save)


def fit(
    folder: Path,
    num_stages: int,
    num_chunks: int,
    accumulated: int,
    *callbacks: L.Callback,
    data: GraphData | None = None,
    **options: Any,
) -> FitResult:
    """Train on two replicas; 0 stages are Lightning's DDP."""
    folder.mkdir(exist_ok=True)
    return fit_batches(
        Surrounded(is_normed=num_chunks == 1),
        data or GraphData(is_noise=False),
        tmp_path=folder,
        num_stages=num_stages,
        num_replicas=REPLICAS,
        num_chunks=num_chunks,
        max_epochs=EPOCHS,
        callbacks=[*callbacks, looks(folder)],
        seeds_workers=True,
        trainer_kwargs={
            "limit_val_batches": 1.0,
            "accumulate_grad_batches": accumulated,
            "gradient_clip_val": 0.05 if accumulated > 1 else None,
            "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        },
        **options,
    )


def of_each(run: FitResult) -> list[list[Step]]:
    """Return the steps of each replica."""
    return [run.steps, *run.others]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "accumulated", "num_workers"),
    [(1, 1, 1, 0), (2, 3, 2, 0), slow(1, 3, 2, 0), slow(1, 1, 1, 1)],
)
def test_replicas_are_lightnings_ddp(
    num_stages: int, num_chunks: int, accumulated: int, num_workers: int, tmp_path: Path
) -> None:
    """Order of batches, losses, gradients, weights, running statistics, bytes, what is logged."""
    stats, folders = StatsRecorder(tmp_path), (tmp_path / "ddp", tmp_path / "piped")
    ddp, piped = (
        fit(folder, stages, num_chunks, accumulated, *more, data=GraphData(num_workers))
        for folder, stages, more in zip(folders, (0, num_stages), ((), (stats,)), strict=True)
    )
    for steps, expected in zip(of_each(piped), of_each(ddp), strict=True):
        assert_steps_equal(steps, expected)
        for step, other in zip(steps, piped.steps, strict=True):  # the same bits
            assert all(torch.equal(step.weights[n], other.weights[n]) for n in step.weights)
    assert not torch.allclose(piped.steps[0].outputs, piped.others[0][0].outputs)
    assert metrics_of(piped.trainer) == pytest.approx(metrics_of(ddp.trainer), rel=1e-10)
    ours, theirs = (
        [run.state_dict, *(torch.load(folder / f"buffers_{one}.pt") for one in range(REPLICAS))]
        for run, folder in zip((piped, ddp), folders, strict=True)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    parameters = Surrounded(is_normed=num_chunks == 1).parameters()
    # Of a mean, with a number for each weight: there or None.
    num_bytes = 2 * (REPLICAS - 1) * sum(p.numel() + 1 for p in parameters) * 8
    counted = [step.get("data_grad", 0) for step in torch.load(tmp_path / "bytes.pt")]
    assert counted == EPOCHS * [num_bytes * (accumulated == 1), num_bytes, num_bytes]


def test_p6_replicas_go_on_from_a_checkpoint_with_other_stages_or_alone(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_top_k=-1)
    whole = fit(tmp_path, 2, 3, 2, saver, EarlyStopping("val_loss", patience=5))
    path = tmp_path / "epoch=0.ckpt"
    resumed = fit(tmp_path, 1, 3, 2, ckpt_path=path)
    for steps, own in zip(of_each(resumed), of_each(whole), strict=True):
        assert_steps_equal(steps, own[len(own) // EPOCHS :])

    ordered = DataLoader(draw_batch(SIZES).to_data_list(), batch_size=BATCH)
    shared: dict[str, Any] = {"tmp_path": tmp_path, "max_epochs": EPOCHS, "ckpt_path": path}
    alone, plain = (fit_batches(Surrounded(), ordered, num_stages=n, **shared) for n in (1, 0))
    assert_steps_equal(alone.steps, plain.steps)
