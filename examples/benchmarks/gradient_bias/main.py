"""Which share of the exact gradient is left where weights stand still, and how noisy is it?

    python examples/benchmarks/gradient_bias/main.py --root DIR

Trains GCNII exactly, stops it, and runs on with a learning rate of 0: the mean of the gradients is
then what each way of meeting staleness converges to. Random chunks, one process of one thread.
Prints, for each group of weights, the mean gradient's projection on the exact one (1: all of it is
there) and, where there is dropout, its standard deviation as a multiple of the exact one's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))
from common import print_table
from graphs import load_graph
from quiet import silence_lightning

from lightning_gnnpipe import (
    DelayedGradients,
    FullGraphDataModule,
    GNNPipeStrategy,
    RenewedRows,
    StalenessMethod,
)
from lightning_gnnpipe.models import GCNII, NodeClassifier
from lightning_gnnpipe.types import StalenessName

VALIDATED = RenewedRows(None, noise=0.7)
METHODS: dict[str, StalenessMethod | StalenessName] = {
    "constant": "constant",
    "scaled": "scaled",
    "delayed": "delayed",
    "lead 0.5": StalenessMethod(DelayedGradients(lead=0.5), VALIDATED),
    "decay 0.75, lead 0.3": StalenessMethod(
        DelayedGradients(0.75, scale=1.25, lead=0.3), VALIDATED
    ),
    "predicted": "predicted",
}
GROUP = 8  # convolutions a row
NUM_SETTLING = 40  # steps before gradients count: those that wait take as many as there are layers


class Gradients(L.Callback):
    """Sums gradients by group of weights, odd and even steps apart, and their squares."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}
        self.squares: dict[str, float] = defaultdict(float)
        self.num_steps = 0

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, *_: Any
    ) -> None:
        if trainer.current_epoch < NUM_SETTLING:
            return
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                parts[group_of(name)].append(weight.grad.detach().double().flatten())
        for group, flat in parts.items():
            gradient = torch.cat(flat)
            sums = self.sums.setdefault(group, [torch.zeros_like(gradient) for _ in range(2)])
            sums[self.num_steps % 2] += gradient
            self.squares[group] += float(gradient @ gradient)
        self.num_steps += 1

    def means(self, group: str) -> tuple[Tensor, Tensor]:
        """Return the mean of even steps and that of odd ones, whose noise is not the same."""
        even, odd = self.sums[group]
        return even / ((self.num_steps + 1) // 2), odd / (self.num_steps // 2)

    def variance(self, group: str) -> float:
        """Return the variance of a step's gradient, summed over its entries."""
        even, odd = self.means(group)
        return self.squares[group] / self.num_steps - float(even @ odd)


def group_of(name: str) -> str:
    """Return the row of a weight."""
    if ".convs." not in name:
        return name.split(".")[1]
    first = int(name.split(".convs.")[1].split(".")[0]) // GROUP * GROUP
    return f"convs {first + 1}-{first + GROUP}"


def compare(exact: Gradients, other: Gradients, group: str) -> tuple[float, float]:
    """Return the mean gradient's projection on the exact one, and the ratio of deviations."""
    even, odd = exact.means(group)
    mean = (even + odd) / 2
    size = float(even @ odd)
    if other is exact:
        return 1.0, 1.0
    share = float(mean @ sum(other.means(group))) / 2 / size
    ratio = (max(other.variance(group), 0.0) / max(exact.variance(group), 1e-300)) ** 0.5
    return share, ratio


def train(
    module: NodeClassifier,
    datamodule: FullGraphDataModule,
    *,
    num_epochs: int,
    staleness: StalenessMethod | StalenessName,
    num_chunks: int,
) -> Gradients:
    """Train on random chunks, and return the gradients."""
    gradients = Gradients()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(
            num_chunks=num_chunks, partition="random", staleness=staleness, chunk_order="shuffled"
        ),
        max_epochs=num_epochs,
        callbacks=[gradients],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)
    return gradients


def measure(options: argparse.Namespace, dropout: float) -> None:
    """Print the table of one dropout."""
    datamodule = FullGraphDataModule(load_graph(options.dataset, options.root))

    def make(lr: float) -> NodeClassifier:
        L.seed_everything(options.seed, verbose=False)
        net = GCNII(
            datamodule.num_features, 64, datamodule.num_classes, options.layers, dropout=dropout
        )
        return NodeClassifier(net, datamodule.num_classes, lr, 5e-4)

    trained = make(0.01)
    settled = NUM_SETTLING + options.steps
    train(trained, datamodule, num_epochs=options.epochs, staleness="constant", num_chunks=1)
    found: dict[str, Gradients] = {}
    for name in ("exact", *METHODS):
        module = make(0.0)
        module.load_state_dict(trained.state_dict())
        found[name] = train(
            module,
            datamodule,
            num_epochs=settled,
            staleness=METHODS.get(name, "constant"),
            num_chunks=1 if name == "exact" else options.chunks,
        )
    rows = []
    for group in found["exact"].sums:
        pairs = [compare(found["exact"], found[name], group) for name in METHODS]
        cells = [f"{s:.2f}, {r:.2f}" if dropout else f"{s:.2f}" for s, r in pairs]
        rows.append([group, *cells])
    print(f"\nDropout {dropout:g}: share of the exact gradient" + ", noise" * bool(dropout))
    print_table(["weights", *METHODS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default=os.environ.get("GNNPIPE_DATA"))
    parser.add_argument("--dataset", default="Cora")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=100, help="exact ones")
    parser.add_argument("--steps", type=int, default=100, help="over which gradients are averaged")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    silence_lightning()
    for dropout in options.dropout:
        measure(options, dropout)


if __name__ == "__main__":
    main()
