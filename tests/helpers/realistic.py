"""A LightningModule that uses much of what users use, around a net whose layers share weights."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy


class TiedNet(nn.Module):
    """Three layers, the last two with the same weights; edge features; a dict for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GATv2Conv(8, 4, heads=2, edge_dim=2)
        self.shared = gnn.GCNConv(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Any]:
        x = self.first(x, edge_index, edge_attr).relu()
        x = x + self.shared(self.norm(x), edge_index).relu()
        x = x + self.shared(self.norm(x), edge_index).relu()
        return {"h": x, "both": (x, x * 2)}


class Realistic(L.LightningModule):
    """Parts before and behind the net, torchmetrics, two parameter groups, a learned scalar.

    Args:
        scheduler: None, "plateau" or "step".
        is_manual: Optimize by hand.
    """

    def __init__(self, scheduler: str | None = None, is_manual: bool = False) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 8)
        self.net = TiedNet()
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.scheduler = scheduler
        self.automatic_optimization = not is_manual

    def forward(self, data: Data) -> Tensor:
        found = self.net(self.encode(data.x), data.edge_index, edge_attr=data.edge_attr)
        return self.head(found["h"]) * self.scale + found["both"][1][:, :3]

    def step(self, data: Data, name: str) -> Tensor:
        mask = data[f"{name}_mask"]
        logits = self(data)[mask]
        loss = F.cross_entropy(logits, data.y[mask])
        self.accuracy(logits, data.y[mask])
        self.log(f"{name}_loss", loss, batch_size=1, sync_dist=True)
        self.log(f"{name}_acc", self.accuracy, batch_size=1)
        self.log(f"{name}_nodes", float(mask.sum()), reduce_fx="sum", batch_size=1, sync_dist=True)
        return loss

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = self.step(data, "train")
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
        return loss

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.step(data, "val")

    def test_step(self, data: Data, batch_idx: int) -> None:
        self.step(data, "test")

    def predict_step(self, data: Data, batch_idx: int) -> Tensor:
        return self(data)

    def configure_optimizers(self) -> Any:
        wide = [p for p in self.parameters() if p.ndim > 1]
        narrow = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": wide, "weight_decay": 0.01}, {"params": narrow}]
        optimizer = torch.optim.Adam(groups, lr=0.02)
        if self.scheduler == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=0.5
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
            }
        if self.scheduler == "step":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]
        return optimizer


def realistic_graph() -> Data:
    """60 nodes, 200 random edges, edge features, masks."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def mask() -> Tensor:
        return torch.rand(60, generator=generator) < 0.5

    return Data(
        x=draw(60, 5),
        edge_index=torch.randint(0, 60, (2, 200), generator=generator),
        edge_attr=draw(200, 2),
        y=torch.randint(0, 3, (60,), generator=generator),
        train_mask=mask(),
        val_mask=mask(),
        test_mask=mask(),
    )
