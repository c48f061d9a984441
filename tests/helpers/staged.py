"""A module for schedules of micro-batches: layers before and after the net, a loss that changes.

Its training_step does all that could go wrong where it runs again: it counts, draws random numbers
of all kinds, keeps lists, updates a metric, drops out behind the net and logs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Batch
from torchmetrics import MeanSquaredError

from tests.helpers.batches import NUM_FEATURES, NUM_TARGETS, WIDTH, draw_batch
from tests.helpers.launch import BatchList, FitResult, assert_transparent, fit_batches

NUM_LAYERS = 7
LOSSES = ("mean over graphs", "sum", "mean over nodes", "class weights", "mask", "both")


class Deep(nn.Module):
    """Seven layers on bare tensors; rows of nodes and of graphs, and integers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.norm = gnn.GraphNorm(WIDTH, eps=0.1)  # a graph of one node has no variance
        self.dropout = dropout

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        for conv in self.convs:
            h = self.norm(conv(x, edge_index), batch).tanh()
            x = x + F.dropout(h, self.dropout, training=self.training)
        return {"nodes": x, "graphs": (gnn.global_mean_pool(x, batch, size), x.argmax(-1))}


class Staged(L.LightningModule):
    """Another loss in each batch, see `LOSSES`.

    Args:
        losses: Those to take in turn.
        dropout: In the net.
    """

    def __init__(self, losses: tuple[str, ...] = LOSSES, dropout: float = 0.0) -> None:
        super().__init__()
        self.losses = losses
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.before = nn.Linear(NUM_FEATURES, WIDTH).double()
            self.net = Deep(dropout).double()
            self.after = nn.Linear(WIDTH, NUM_TARGETS).double()
        self.metric = MeanSquaredError()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.num_steps, self.kept, self.sizes = 0, [0.0], {"largest": 0}
        self.outputs = torch.empty(0)

    def training_step(self, data: Batch, batch_idx: int) -> dict[str, Tensor]:
        self.num_steps += 1
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        data.x = self.before(data.x) + 0.1 * noise
        out = self.net(data.x, data.edge_index, data.batch, data.num_graphs)
        graphs, nodes = out["graphs"][0], out["nodes"]
        assert torch.equal(out["graphs"][1], nodes.argmax(-1))
        predicted = self.after(F.dropout(graphs, 0.3))
        self.kept.append(float(predicted.detach().sum()))
        self.sizes["largest"] = max(self.sizes["largest"], data.num_nodes)
        self.total += 1
        self.metric(predicted.detach(), data.y)
        loss = self.loss(self.losses[batch_idx % len(self.losses)], predicted, nodes, data)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        self.log("metric", self.metric, on_epoch=True, on_step=True, batch_size=1)
        draws = torch.rand(()) + random.random() + float(np.random.rand())
        values = {"count": self.num_steps, "kept": sum(self.kept), "total": self.total}
        self.log_dict({**values, "noise": noise, "draws": draws, **self.sizes}, batch_size=1)
        self.outputs = torch.cat([graphs.detach().flatten(), nodes.detach().flatten()])
        return {"loss": loss}

    def predict_step(self, data: Batch, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index, data.batch, data.num_graphs)
        return torch.cat([out["graphs"][0], out["nodes"]])

    def loss(self, kind: str, predicted: Tensor, nodes: Tensor, data: Batch) -> Tensor:
        rows = torch.arange(data.num_nodes) % 3 == 0
        classes, weight = (data.y[:, 0] > 0).long(), predicted.new_tensor([0.3, 2.0])
        return {
            "mean over graphs": lambda: F.mse_loss(predicted, data.y),
            "sum": lambda: F.mse_loss(predicted, data.y, reduction="sum"),
            "mean over nodes": lambda: nodes.square().mean(),
            "class weights": lambda: F.cross_entropy(predicted, classes, weight=weight),
            "mask": lambda: nodes[rows].abs().mean(),
            "both": lambda: F.l1_loss(predicted, data.y) + nodes[:, 0].sum() * 0.2,
        }[kind]()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class LogRecorder(L.Callback):
    """Writes what every rank has logged in each step, and what its module keeps at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Staged, *args: Any) -> None:
        self.steps.append({name: float(v) for name, v in trainer.callback_metrics.items()})
        self.steps[-1] |= {"kept": sum(module.kept), "next": float(torch.rand(()))}

    def on_train_end(self, trainer: L.Trainer, module: Staged) -> None:
        self.steps.append({name: float(v) for name, v in trainer.callback_metrics.items()})
        torch.save(self.steps, self.folder / f"logged{trainer.global_rank}.pt")


class FreshBatches(BatchList):
    """Yield copies, as a loader does: the step puts other features in."""

    def __iter__(self) -> Iterator[Any]:
        return map(copy.copy, self.batches)


def batches_of_all_sizes() -> list[Batch]:
    """Return batches of 1, 2, 5 and more than 10 graphs, some of them empty or single nodes."""
    shapes = [(9,), (4, 7), (3, 0, 5, 2, 1, 6), (4, 7, 1, 9, 5, 6, 3, 8, 5, 4, 6, 2)]
    shapes += [(5, 3, 8, 2, 4), (2, 9, 1, 1, 4, 6, 3, 5, 2, 7)]
    return [draw_batch(sizes, seed) for seed, sizes in enumerate(shapes)]


NUM_VIRTUAL = {"fill_drain": 1, "1f1b": 1, "interleaved": 2}

Logged = list[list[dict[str, float]]]


class Turning(Staged):
    """Meets a batch with another loss in each epoch."""

    def training_step(self, data: Any, batch_idx: int) -> dict[str, Tensor]:
        return super().training_step(data, batch_idx + self.current_epoch)


def fit(
    schedule: str | None, num_stages: int, tmp_path: Path, **options: Any
) -> tuple[FitResult, Logged]:
    """Train; plainly where there is no schedule. Return as well what each rank has logged."""
    folder = tmp_path / f"{schedule}_{num_stages}"
    folder.mkdir(exist_ok=True)
    callbacks = [LogRecorder(folder), *options.pop("callbacks", ())]
    result = fit_batches(
        options.pop("module", None) or Turning(),
        FreshBatches(options.pop("batches", None) or batches_of_all_sizes()),
        num_stages=num_stages if schedule else 0,
        num_chunks=options.pop("num_chunks", 10),
        callbacks=callbacks,
        strategy_kwargs={"schedule": schedule, **options.pop("strategy_kwargs", {})},
        tmp_path=tmp_path,
        **options,
    )
    ranks = range(num_stages if schedule else 1)
    return result, [torch.load(folder / f"logged{rank}.pt") for rank in ranks]


def assert_same(
    piped: tuple[FitResult, Logged],
    plain: tuple[FitResult, Logged],
) -> None:
    assert_transparent(piped[0], plain[0])
    for logged in piped[1]:
        for ours, theirs in zip(logged, plain[1][0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)  # logged in single precision


def single(data: Any) -> Any:
    return data.apply(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


def widened(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)[:, :WIDTH]
