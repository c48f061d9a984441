"""NodeClassifier: an ordinary LightningModule for any node-level network and masks."""

from __future__ import annotations

from functools import partial
from typing import Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy

Split = Literal["train", "val", "test"]


class NodeClassifier(L.LightningModule):
    """Classify the nodes of one graph; written for one device, unaware of any strategy.

    A batch is a whole graph: ``x``, ``edge_index``, labels ``y`` ``[num_nodes]``, and the boolean
    masks ``train_mask``, ``val_mask`` and ``test_mask`` ``[num_nodes]``. The loss is the mean
    cross-entropy over the mask. Logs ``train_loss``, ``train_acc``, ``val_loss``, ``val_acc`` and
    ``test_acc``. Predicts the logits ``[num_nodes, num_classes]`` of all nodes.

    Example::

        net = GCNII(data.num_features, 64, 7, num_layers=32)
        trainer.fit(NodeClassifier(net, num_classes=7), datamodule=FullGraphDataModule(data))

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

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self._shared_step(batch, "train")

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self._shared_step(batch, "val")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self._shared_step(batch, "test")

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def _shared_step(self, batch: Data, split: Split) -> Tensor:
        """Return the loss on the split; log accuracy and, except for test, the loss."""
        mask = batch[f"{split}_mask"]
        logits, labels = self(batch)[mask], batch.y[mask]
        loss = F.cross_entropy(logits, labels)
        metric = getattr(self, f"{split}_acc")
        metric(logits, labels)

        log = partial(
            self.log, on_step=False, on_epoch=True, prog_bar=True, batch_size=labels.numel()
        )
        if split != "test":
            log(f"{split}_loss", loss)
        log(f"{split}_acc", metric)
        return loss
