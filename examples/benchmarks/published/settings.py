"""The settings of settings.yaml, as objects, and what they train."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.transforms import AddSelfLoops, Compose, RemoveSelfLoops, ToUndirected
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

sys.path.append(str(Path(__file__).parents[2]))
from graphs import load_graph

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.models import GCNII, GNN

SETTINGS = Path(__file__).parent / "settings.yaml"
MODELS = {"GCNII": GCNII, "GNN": GNN}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table; the fields are the keys of settings.yaml, which explains them."""

    name: str
    model: str
    graph: str
    metric: str  # accuracy or auroc
    split: str  # public, given (one of several, by seed) or drawn (60/20/20, by seed)
    seeds: int
    layers: int
    hidden: int
    dropout: float
    lr: float
    epochs: int
    decay: float
    select: str
    chunks: int
    source: str
    published: float
    deviation: float = 0.0
    patience: int = 0  # epochs without a smaller validation loss; 0: all epochs are run
    decay_convs: float | None = None
    decay_first: float | None = None  # of the first convolution
    loops: bool = False
    net: Mapping[str, Any] = field(default_factory=dict)


def read_settings(pattern: str = "*") -> list[Setting]:
    """Return the settings whose names match `pattern`, one or several joined by commas.

    Raises:
        ValueError: If none matches.
    """
    settings = [Setting(**fields) for fields in yaml.safe_load(SETTINGS.read_text())["settings"]]
    found = [s for s in settings if any(fnmatch(s.name, one) for one in pattern.split(","))]
    if not found:
        names = ", ".join(setting.name for setting in settings)
        raise ValueError(f"Expected a setting that matches {pattern!r}, among {names}.")
    return found


def make_data(setting: Setting, seed: int, root: str | None) -> FullGraphDataModule:
    """Return the graph of a setting with the masks of a seed.

    Raises:
        OSError: If it is neither in `root` nor can be downloaded.
    """
    graph = load_graph(setting.graph, root)
    module = FullGraphDataModule(graph, split=seed if setting.split == "given" else 0, seed=seed)
    module.data.x = module.data.x.to(torch.get_default_dtype())
    if setting.loops:
        with_loops = Compose([ToUndirected(), RemoveSelfLoops(), AddSelfLoops()])
        module.data = with_loops(module.data)
    return module


def make_metric(setting: Setting, num_classes: int) -> Metric:
    """Return what a setting is measured by."""
    if setting.metric == "auroc":
        return BinaryAUROC()
    return MulticlassAccuracy(num_classes, average="micro")


class Published(L.LightningModule):
    """Trains a setting; logs val_loss, val_metric and test_metric after each epoch."""

    def __init__(self, setting: Setting, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.setting = setting
        self.net = MODELS[setting.model](
            num_features,
            setting.hidden,
            num_classes,
            num_layers=setting.layers,
            dropout=setting.dropout,
            **setting.net,
        )
        self.val_metric = make_metric(setting, num_classes)
        self.test_metric = make_metric(setting, num_classes)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    def validation_step(self, data: Data, batch_idx: int) -> None:
        out = self.net(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.val_mask], data.y[data.val_mask])
        self.log("val_loss", loss, batch_size=1)
        scores = out.softmax(-1)[:, 1] if self.setting.metric == "auroc" else out
        for name in ("val", "test"):
            mask, metric = data[f"{name}_mask"], getattr(self, f"{name}_metric")
            metric(scores[mask], data.y[mask])
            self.log(f"{name}_metric", metric, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        setting = self.setting
        first = set(self.net.convs[0].parameters())
        convs = set(self.net.convs.parameters()) - first
        decay_convs = setting.decay if setting.decay_convs is None else setting.decay_convs
        decay_first = decay_convs if setting.decay_first is None else setting.decay_first
        rest = [p for p in self.net.parameters() if p not in first | convs]
        groups = [
            {
                "params": [p for p in self.net.parameters() if p in first],
                "weight_decay": decay_first,
            },
            {
                "params": [p for p in self.net.parameters() if p in convs],
                "weight_decay": decay_convs,
            },
            {"params": rest, "weight_decay": setting.decay},
        ]
        return torch.optim.Adam(groups, lr=setting.lr)
