"""One run of the study, in a process of one thread: its accuracy, loss and time over the epochs.

    python cell.py --root DIR --dataset Cora --chunks 8 --partition random --method constant ...

Prints one line of JSON. Staleness depends on chunks and their order, never on the number of stages,
so one process trains what any number of them would.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch_geometric.data import Data

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))
from accuracy import MODELS, DeepClassifier
from graphs import load_graph
from quiet import silence_lightning
from synthetic import make_arxiv_like
from watched import Watched

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.graph import edge_cut_frac, partition_nodes
from lightning_gnnpipe.types import PartitionMethod, StalenessName

METHODS: dict[str, StalenessName] = {
    "exact": "constant",
    "default": "drift",
    "constant": "constant",
    "gnnpipe": "gnnpipe",
}
MADE: dict[str, Callable[[], Data]] = {
    "arxiv-like": make_arxiv_like,
    "arxiv-dense": partial(make_arxiv_like, 4_000, 40, 10),
}
NUM_LATE = 20


@dataclass(frozen=True)
class Recipe:
    """What a network is trained with; Adam in any case."""

    hidden_channels: int
    dropout: float
    lr: float
    conv_decay: float
    linear_decay: float


RECIPES = {
    "gcnii": Recipe(64, 0.6, 0.01, 0.01, 5e-4),  # GCNII (arXiv 2007.02133) for Cora
    "gcnii-fast": Recipe(64, 0.6, 0.02, 0.01, 5e-4),  # twice the rate, for one that falls
    "resgcnplus": Recipe(64, 0.6, 0.01, 5e-4, 5e-4),  # the same decay for all
    "resgcnplus-slow": Recipe(64, 0.6, 1e-3, 5e-4, 5e-4),  # the rate of GNNPipe
    "resgcnplus-mid": Recipe(64, 0.6, 2e-3, 5e-4, 5e-4),  # twice that, for one that falls
    "resgcnplus-decay": Recipe(64, 0.6, 2e-3, 0.05, 0.05),  # a hundred times its decay
    "resgcnplus-fast": Recipe(64, 0.6, 5e-3, 5e-3, 5e-3),  # for fewer epochs
    "gnnpipe": Recipe(100, 0.5, 1e-3, 0.0, 0.0),  # GNNPipe (arXiv 2308.10087) for all
    "gnnpipe-fast": Recipe(64, 0.5, 0.01, 0.0, 0.0),  # the same in fewer epochs
    "gnnpipe-light": Recipe(64, 0.25, 0.01, 0.0, 0.0),  # half the dropout
    "gnnpipe-faster": Recipe(64, 0.5, 0.02, 0.0, 0.0),
    "gnnpipe-fastest": Recipe(64, 0.5, 0.05, 0.0, 0.0),
}


@dataclass(frozen=True)
class Cell:
    """One run; every field is an option of this script."""

    dataset: str = "Cora"
    model: str = "gcnii"
    layers: int = 32
    chunks: int = 8
    partition: PartitionMethod = "random"
    method: str = "default"
    order: str = "shuffled"  # "fixed" in rows of cells.csv of an earlier version
    warmup: int = 1
    clip: float = 0.0
    recipe: str = "gcnii"
    anneal: int = 0
    adaptive: int = 0  # 1 in rows of cells.csv with a control that there is no more
    epochs: int = 200
    seed: int = 0

    @property
    def name(self) -> str:
        """The cell as the name of a file."""
        return "_".join(str(value) for value in asdict(self).values())


class WatchedDeep(Watched, DeepClassifier):
    """Decays as the one, logs as the other; in the last epochs its rate falls along a cosine."""

    num_epochs: int = 0
    num_annealed: int = 0

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if not self.num_annealed:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.share_of_rate)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def share_of_rate(self, epoch: int) -> float:
        """Return the share of the learning rate that an epoch has."""
        done = max(epoch - (self.num_epochs - self.num_annealed), 0) / self.num_annealed
        return 0.5 * (1 + math.cos(math.pi * done))


class Curves(L.Callback):
    """What the run shows, one number an epoch; seconds are those of training steps alone."""

    def __init__(self) -> None:
        self.epochs: dict[str, list[float]] = {
            name: [] for name in ("seconds", "train_loss", "val_acc", "test_acc")
        }
        self._start_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start_s = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.epochs["seconds"].append(time.perf_counter() - self._start_s)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for name in ("train_loss", "val_acc", "test_acc"):
            self.epochs[name].append(float(trainer.callback_metrics[name]))


def run(cell: Cell, root: str | None) -> dict[str, Any]:
    """Train one cell; return its summary and curves."""
    make = MADE.get(cell.dataset)
    datamodule = FullGraphDataModule(make() if make else load_graph(cell.dataset, root))
    L.seed_everything(cell.seed, verbose=False)
    recipe = RECIPES[cell.recipe]
    net = MODELS[cell.model](
        datamodule.num_features,
        recipe.hidden_channels,
        datamodule.num_classes,
        cell.layers,
        recipe.dropout,
    )
    module = WatchedDeep(
        net, datamodule.num_classes, recipe.lr, recipe.linear_decay, recipe.conv_decay
    )
    module.num_epochs, module.num_annealed = cell.epochs, cell.anneal
    partition = partition_of(datamodule.data, cell)
    curves = Curves()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(
            partition=partition,
            staleness=METHODS[cell.method],
        ),
        max_epochs=cell.epochs,
        callbacks=[
            StalenessWarmup(cell.epochs if cell.method == "exact" else cell.warmup),
            curves,
        ],
        gradient_clip_val=cell.clip or None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)
    cut = edge_cut_frac(datamodule.data.edge_index, partition)
    return {**summarize(curves.epochs), "cut_frac": cut, "curves": curves.epochs}


def partition_of(data: Data, cell: Cell) -> Tensor:
    """Return the chunk of each node, `[num_nodes]`; it does not depend on the seed of the run."""
    assert data.edge_index is not None and data.num_nodes is not None
    return partition_nodes(
        data.edge_index, data.num_nodes, num_chunks=cell.chunks, method=cell.partition, seed=0
    )


def summarize(curves: dict[str, list[float]]) -> dict[str, float]:
    """Return test accuracy at the best validation accuracy, and how far it falls at the end."""
    val, test = curves["val_acc"], curves["test_acc"]
    best = max(range(len(val)), key=val.__getitem__)
    late_val, late_test = val[-NUM_LATE:], test[-NUM_LATE:]
    return {
        "test_acc": test[best],
        "best_epoch": best,
        "late_test_acc": statistics.mean(late_test),
        "test_swing": test[best] - min(late_test),
        "val_swing": val[best] - min(late_val),
        "late_train_loss": statistics.mean(curves["train_loss"][-NUM_LATE:]),
        "epoch_s": statistics.median(curves["seconds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default=os.environ.get("GNNPIPE_DATA"))
    for field in fields(Cell):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)
    silence_lightning()
    root = options.pop("root")
    print(json.dumps(run(Cell(**options), root)))


if __name__ == "__main__":
    main()
