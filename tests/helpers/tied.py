"""A network with tied layers and an encoder that is used outside of it as well."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES

D = 8


class Net(nn.Module):
    """Norms with running statistics; the first and the last layer share their weights."""

    def __init__(self, encoder: nn.Linear) -> None:
        super().__init__()
        self.lin_in = encoder
        self.convs = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(4))
        self.convs[-1] = self.convs[0]
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in self.convs)
        self.aux = nn.Linear(D, D)  # in training alone

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin_in(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), 0.4, self.training)
        return x + self.aux(x) if self.training else x


class TiedModule(L.LightningModule):
    """Its encoder is used in the pipelined module as well as outside; its head is outside."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_FEATURES, D)
        self.net = Net(self.lin_in)
        self.head = nn.Linear(D, NUM_CLASSES)
        self.folder = folder

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        logits = self.head(self.net(data.x, data.edge_index) + self.lin_in(data.x))
        return F.cross_entropy(logits, data.y)
