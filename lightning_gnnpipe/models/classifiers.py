"""LightningModules around any network: classify the nodes of one graph, or whole graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

Split = Literal["train", "val", "test"]


class _Classifier(L.LightningModule):
    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self._shared_step(batch, "train")

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self._shared_step(batch, "val")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self._shared_step(batch, "test")

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self(batch)

    def _shared_step(self, batch: Data, split: Split) -> Tensor:
        """Return the loss on the split; log the metric and, except for test, the loss."""
        raise NotImplementedError

    def _log(self, split: Split, name: str, metric: Metric, loss: Tensor, size: int) -> None:
        log = partial(self.log, on_step=False, on_epoch=True, prog_bar=True, batch_size=size)
        if split != "test":
            log(f"{split}_loss", loss, sync_dist=True)
        log(f"{split}_{name}", metric)


class NodeClassifier(_Classifier):
    """Classify the nodes of one graph; written for one device, unaware of any strategy.

    A batch is a whole graph: ``x``, ``edge_index``, labels ``y`` ``[num_nodes]``, and the boolean
    masks ``train_mask``, ``val_mask`` and ``test_mask`` ``[num_nodes]``. The loss is the mean
    cross-entropy over the mask. Logs ``train_loss``, ``train_acc``, ``val_loss``, ``val_acc`` and
    ``test_acc``. Predicts the logits ``[num_nodes, num_classes]`` of all nodes.

    Examples:
        >>> net = GCNII(data.num_features, 64, 7, num_layers=32)
        >>> trainer.fit(NodeClassifier(net, num_classes=7), datamodule=FullGraphDataModule(data))

    Args:
        net: Called as ``net(x, edge_index)``; returns the logits ``[num_nodes, num_classes]``.
        num_classes: Number of classes.
        lr: Learning rate of Adam.
        weight_decay: L2 penalty of Adam, on all parameters.
    """

    def __init__(
        self, net: nn.Module, num_classes: int, lr: float = 0.01, weight_decay: float = 5e-4
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        self.net = net
        self.lr = lr
        self.weight_decay = weight_decay
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, data: Data) -> Tensor:
        return self.net(data.x, data.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def _shared_step(self, batch: Data, split: Split) -> Tensor:
        mask = batch[f"{split}_mask"]
        logits, labels = self(batch)[mask], batch.y[mask]
        loss = F.cross_entropy(logits, labels)
        metric = getattr(self, f"{split}_acc")
        metric(logits, labels)
        self._log(split, "acc", metric, loss, labels.numel())
        return loss


class GraphClassifier(_Classifier):
    """Classify whole graphs; written for one device, unaware of any strategy.

    A batch is a mini-batch from PyG's ``DataLoader``, with one label a graph in ``y``
    ``[num_graphs]`` or ``[num_graphs, 1]``. The loss is the mean cross-entropy over the graphs.
    Logs ``train_loss``, ``train_acc``, ``val_loss``, ``val_acc`` and ``test_acc`` (``..._auroc``
    with ``metric="auroc"``). Predicts the logits ``[num_graphs, num_classes]``.

    Examples:
        >>> net = GIN(dataset.num_features, 64, dataset.num_classes)
        >>> module = GraphClassifier(net, num_classes=dataset.num_classes)
        >>> trainer.fit(module, DataLoader(dataset, batch_size=64, shuffle=True))

    Args:
        net: Called with the batch's ``inputs``; returns the logits ``[num_graphs, num_classes]``.
        num_classes: Number of classes.
        lr: Learning rate of AdamW.
        weight_decay: Decay of AdamW, on all parameters.
        inputs: Attributes of the batch that ``net`` is called with, in this order.
        metric: "acc", the share of graphs classified correctly, or "auroc", the area under the ROC
            curve of the second of two classes.

    Raises:
        ValueError: ``metric`` is "auroc" and there are not two classes.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        inputs: Sequence[str] = ("x", "edge_index", "batch"),
        metric: Literal["acc", "auroc"] = "acc",
    ) -> None:
        super().__init__()
        if metric == "auroc" and num_classes != 2:
            raise ValueError(
                f"Expected two classes for the area under the ROC curve (got {num_classes}). "
                "Set metric='acc'."
            )
        self.save_hyperparameters(ignore=["net"])
        self.net = net
        self.lr = lr
        self.weight_decay = weight_decay
        self.inputs = tuple(inputs)
        self.metric = metric
        self.train_metric = _make_metric(metric, num_classes)
        self.val_metric = _make_metric(metric, num_classes)
        self.test_metric = _make_metric(metric, num_classes)

    def forward(self, data: Data) -> Tensor:
        return self.net(*(getattr(data, name) for name in self.inputs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def _shared_step(self, batch: Data, split: Split) -> Tensor:
        logits, labels = self(batch), batch.y.view(-1).long()
        loss = F.cross_entropy(logits, labels)
        metric = getattr(self, f"{split}_metric")
        metric.update(logits[:, 1] - logits[:, 0] if self.metric == "auroc" else logits, labels)
        self._log(split, self.metric, metric, loss, labels.numel())
        return loss


def _make_metric(metric: Literal["acc", "auroc"], num_classes: int) -> Metric:
    return BinaryAUROC() if metric == "auroc" else MulticlassAccuracy(num_classes, average="micro")
