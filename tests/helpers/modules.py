"""Five models of at least three layers in plain PyG, and a LightningModule around any of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data

from lightning_gnnpipe.models import GCNII
from tests.helpers.encoders import ENCODED_NETS
from tests.helpers.graphs import NUM_CLASSES, NUM_EDGE_FEATURES, NUM_FEATURES

WIDTH = 6


class EdgeNet(nn.Module):
    """Three convs that read edge features, each in a residual block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin_in = nn.Linear(NUM_FEATURES, WIDTH)
        edges = {"edge_dim": NUM_EDGE_FEATURES}
        self.convs = nn.ModuleList(
            [
                gnn.TransformerConv(WIDTH, WIDTH // 2, heads=2, beta=True, **edges),
                gnn.GINEConv(nn.Linear(WIDTH, WIDTH), train_eps=True, **edges),
                gnn.GENConv(WIDTH, WIDTH, learn_t=True, norm=None, **edges),
            ]
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.convs)
        self.lin_out = nn.Linear(WIDTH, NUM_CLASSES)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.lin_in(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = F.dropout(F.relu(norm(x)), self.dropout, training=self.training)
            x = x + conv(h, edge_index, edge_attr)
        return self.lin_out(x)


NETS = {
    "gcn": lambda dropout: gnn.models.GCN(NUM_FEATURES, WIDTH, 4, NUM_CLASSES, dropout=dropout),
    "sage": lambda dropout: gnn.models.GraphSAGE(
        NUM_FEATURES, WIDTH, 3, NUM_CLASSES, dropout=dropout
    ),
    "gcnii": lambda dropout: GCNII(NUM_FEATURES, WIDTH, NUM_CLASSES, 4, dropout, 0.2, 0.5),
    "gat_jk": lambda dropout: gnn.models.GAT(
        NUM_FEATURES, WIDTH, 3, NUM_CLASSES, dropout=dropout, jk="cat", heads=2
    ),
    "edge": EdgeNet,
}
"""What each promise is tested with: linear aggregation, two inputs a conv, x_0 and a list of all
layers that cross the cuts, attention (``edge_updater``), edge features and residuals."""

NORMED_NETS = {
    "batch_norm": lambda dropout: gnn.models.GCN(
        NUM_FEATURES, WIDTH, 3, NUM_CLASSES, dropout=dropout, norm="BatchNorm", jk="max"
    ),
}
"""With statistics over all nodes, which the oracle does not know."""

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
}


class ReferenceModule(L.LightningModule):
    """Node classification, written for one device as any user would.

    Args:
        name: Key of ``NETS``, ``NORMED_NETS`` or ``ENCODED_NETS``.
        optimizer: Key of ``OPTIMIZERS``.
        seed: Seed of the initial weights; the same seed gives the same weights.
    """

    def __init__(
        self,
        name: str = "gcn",
        *,
        optimizer: str = "momentum",
        lr: float = 0.1,
        weight_decay: float = 0.0,
        dropout: float = 0.0,
        seed: int = 1,
    ) -> None:
        super().__init__()
        make = {**NETS, **NORMED_NETS, **ENCODED_NETS}[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = make(dropout).double()
            for parameter in self.net.parameters():  # no zeros, which could hide an error
                parameter.data += 0.1 * torch.rand_like(parameter)
        self.inputs = ("x", "edge_index", *(["edge_attr"] if name.startswith("edge") else []))
        self.optimizer = optimizer
        self.options = {"lr": lr, "weight_decay": weight_decay}
        self.outputs: Tensor | None = None

    def net_inputs(self, data: Data) -> list[Tensor]:
        return [data[name] for name in self.inputs]

    def loss(self, outputs: Tensor, data: Data) -> Tensor:
        return F.cross_entropy(outputs[data.train_mask], data.y[data.train_mask])

    def forward(self, data: Data) -> Tensor:
        return self.net(*self.net_inputs(data))

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        outputs = self(data)
        self.outputs = outputs.detach().clone()
        loss = self.loss(outputs, data)
        self.log("train_loss", loss, batch_size=1)
        return loss

    def validation_step(self, data: Data, batch_idx: int) -> None:
        loss = F.cross_entropy(self(data)[data.val_mask], data.y[data.val_mask])
        self.log("val_loss", loss, batch_size=1)

    def predict_step(self, data: Data, batch_idx: int) -> Tensor:
        return self(data)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters(), **self.options)
