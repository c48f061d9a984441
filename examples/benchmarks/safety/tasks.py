"""What the networks are trained for: LightningModules written for one device, and their graphs.

Each module logs `val_metric` in validation: accuracy, ROC AUC or R2 of the validation nodes, or,
where links are predicted, the loss without dropout (lower is better).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import InnerProductDecoder
from torch_geometric.utils import degree, negative_sampling, to_torch_csr_tensor
from torchmetrics.functional.classification import binary_auroc, multilabel_auroc
from torchmetrics.functional.regression import r2_score

sys.path.append(str(Path(__file__).parents[1] / "convergence"))
sys.path.append(str(Path(__file__).parents[2]))
from graphs import load_graph
from networks import Shape, make_network
from panel import Cell
from synthetic import make_arxiv_like

from lightning_gnnpipe import FullGraphDataModule

NUM_LABELS = 10  # of the multi-label task
NUM_EMBEDDED = 64  # channels of learned embeddings
NUM_LATENT = 16  # channels of the autoencoder's code
NUM_WARM = 10  # epochs in which the rate of "warmup" rises
MADE: dict[str, Callable[[], Data]] = {
    "arxiv-like": make_arxiv_like,
    "arxiv-dense": partial(make_arxiv_like, 4_000, 40, 10),
    "arxiv-mid": partial(make_arxiv_like, 3_000, 16, 10),  # for layers that are slow
    "arxiv-small": partial(make_arxiv_like, 1_500, 20, 10),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


class Task(L.LightningModule):
    """Trains `net` as `cell` says; subclasses say what the loss is, and what is measured."""

    def __init__(self, cell: Cell, net: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.net = net

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.log("val_metric", self.metric(data), batch_size=1)

    def metric(self, data: Data) -> Tensor:
        """Return what is measured in validation."""
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        cell = self.cell
        extra = {"weight_decay": cell.decay} if cell.decay else {}
        optimizer = OPTIMIZERS[cell.optimizer](self.parameters(), lr=cell.lr, **extra)
        if cell.schedule == "constant":
            return optimizer
        shares = {"cosine": self.cosine, "warmup": lambda epoch: min(1.0, (epoch + 1) / NUM_WARM)}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shares[cell.schedule])
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def cosine(self, epoch: int) -> float:
        """Return the share of the rate that an epoch has, falling to nothing over all epochs."""
        return 0.5 * (1 + math.cos(math.pi * epoch / self.cell.epochs))


class Classes(Task):
    """One class a node; measures accuracy."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    def metric(self, data: Data) -> Tensor:
        found = self.net(data.x, data.edge_index)[data.val_mask].argmax(-1)
        return (found == data.y[data.val_mask]).float().mean()


class Binary(Classes):
    """Two classes; measures ROC AUC."""

    def metric(self, data: Data) -> Tensor:
        out = self.net(data.x, data.edge_index)[data.val_mask]
        return binary_auroc((out[:, 1] - out[:, 0]).sigmoid(), data.y[data.val_mask])


class Labels(Task):
    """Several labels a node, each there or not; measures their mean ROC AUC."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)[data.train_mask]
        return F.binary_cross_entropy_with_logits(out, data.y[data.train_mask].float())

    def metric(self, data: Data) -> Tensor:
        out = self.net(data.x, data.edge_index)[data.val_mask].sigmoid()
        return multilabel_auroc(out, data.y[data.val_mask], num_labels=NUM_LABELS)


class Value(Task):
    """A number a node; measures R2."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)[data.train_mask, 0]
        return F.mse_loss(out, data.y[data.train_mask])

    def metric(self, data: Data) -> Tensor:
        out = self.net(data.x, data.edge_index)[data.val_mask, 0]
        return r2_score(out, data.y[data.val_mask])


class Autoencoder(Task):
    """PyG's graph autoencoder: an inner product tells edges from pairs that were drawn once."""

    def __init__(self, cell: Cell, net: nn.Module, data: Data) -> None:
        super().__init__(cell, net)
        self.decoder = InnerProductDecoder()
        self.negatives: Tensor
        self.register_buffer("negatives", draw_pairs(data), persistent=False)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        code = self.net(data.x, data.edge_index)
        there, not_there = self.decoder(code, data.edge_index), self.decoder(code, self.negatives)
        return -(there + 1e-15).log().mean() - (1 - not_there + 1e-15).log().mean()  # recon_loss

    def metric(self, data: Data) -> Tensor:
        return self.training_step(data, 0)


class Links(Task):
    """OGB's script for ddi: learned embeddings, a network, an MLP on products of two nodes' rows.

    In training the pairs without an edge are drawn anew in each step; what is measured is the loss
    with pairs that were drawn once.
    """

    def __init__(self, cell: Cell, net: nn.Module, data: Data) -> None:
        super().__init__(cell, net)
        self.embedding = nn.Parameter(torch.empty(data.num_nodes or 0, NUM_EMBEDDED))
        nn.init.xavier_uniform_(self.embedding)
        self.predictor = nn.Sequential(
            nn.Linear(cell.hidden, cell.hidden),
            nn.ReLU(),
            nn.Dropout(cell.dropout),
            nn.Linear(cell.hidden, 1),
        )
        self.negatives: Tensor
        self.register_buffer("negatives", draw_pairs(data), persistent=False)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        assert data.edge_index is not None
        negatives = torch.randint(data.num_nodes or 0, data.edge_index.shape)
        return self.loss(data, negatives)

    def metric(self, data: Data) -> Tensor:
        return self.loss(data, self.negatives)

    def loss(self, data: Data, negatives: Tensor) -> Tensor:
        """Return the loss of all edges and as many other pairs."""
        assert data.edge_index is not None
        h = self.net(self.embedding, data.edge_index)
        pairs = torch.cat([data.edge_index, negatives], dim=1)
        scores = self.predictor(h[pairs[0]] * h[pairs[1]]).squeeze(-1)
        is_edge = torch.arange(pairs.size(1)) < data.edge_index.size(1)
        return F.binary_cross_entropy_with_logits(scores, is_edge.float())


TASKS: dict[str, Callable[..., Task]] = {
    "classes": Classes,
    "binary": Binary,
    "labels": Labels,
    "value": Value,
}


def make_task(cell: Cell, datamodule: FullGraphDataModule) -> Task:
    """Return the module that trains `cell`, its weights drawn from the global seed."""
    data = datamodule.data
    assert data.edge_index is not None
    in_degrees = degree(data.edge_index[1], data.num_nodes, dtype=torch.long)
    shape = Shape(
        cell.conv,
        cell.norm,
        cell.layers,
        NUM_EMBEDDED if cell.task == "links" else datamodule.num_features,
        cell.hidden,
        num_outputs(cell, datamodule),
        cell.dropout,
        cell.skip,
        cell.jump,
        in_degrees.bincount(),
    )
    net = make_network(shape)
    if cell.task == "autoencoder":
        return Autoencoder(cell, net, data)
    return Links(cell, net, data) if cell.task == "links" else TASKS[cell.task](cell, net)


def num_outputs(cell: Cell, datamodule: FullGraphDataModule) -> int:
    """Return the channels that the network gives."""
    if cell.task in ("classes", "binary"):
        return datamodule.num_classes
    return {"labels": NUM_LABELS, "value": 1, "autoencoder": NUM_LATENT}.get(cell.task, cell.hidden)


def make_data(cell: Cell, root: str | None) -> FullGraphDataModule:
    """Return the graph of a cell with the targets of its task.

    Raises:
        OSError: If it is a public graph that is neither in `root` nor can be downloaded.
    """
    make = MADE.get(cell.graph)
    datamodule = FullGraphDataModule(make() if make else load_graph(cell.graph, root))
    if cell.task == "labels":
        datamodule.data.y = (draw_targets(datamodule.data, NUM_LABELS) > 0.5).long()
    elif cell.task == "value":
        datamodule.data.y = draw_targets(datamodule.data, 1)[:, 0]
    return datamodule


def draw_targets(data: Data, num: int, noise: float = 0.5) -> Tensor:
    """Return `[num_nodes, num]`: functions of nodes' features and their neighbours', and noise."""
    assert data.x is not None and data.edge_index is not None
    generator = torch.Generator().manual_seed(0)
    size = data.x.size(0)
    around = to_torch_csr_tensor(data.edge_index, size=(size, size))
    degrees = degree(data.edge_index[0], size).clamp(min=1)[:, None]
    own = data.x @ torch.randn(data.x.size(1), num, generator=generator)
    near = around @ (data.x @ torch.randn(data.x.size(1), num, generator=generator)) / degrees
    far = around @ near.relu() / degrees
    parts = [(part - part.mean(0)) / part.std(0) for part in (own, near, far)]
    drawn = noise * torch.randn(size, num, generator=generator)
    return 0.5 * parts[0] + parts[1] + parts[2] + drawn


def draw_pairs(data: Data) -> Tensor:
    """Return as many pairs of nodes without an edge as there are edges, the same for all seeds."""
    assert data.edge_index is not None
    with torch.random.fork_rng():
        L.seed_everything(0, verbose=False)
        return negative_sampling(data.edge_index, data.num_nodes)
