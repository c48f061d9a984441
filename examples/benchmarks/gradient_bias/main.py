"""Which share of the exact gradient does each way of meeting staleness leave?

    python examples/benchmarks/gradient_bias/main.py --root DIR

Trains GCNII exactly, stops it, and runs on with a learning rate of 0, without dropout: the exact
gradient is then the same in every step, and the mean over steps, whose orders of chunks differ, is
what a method has in its place. Random chunks, one process of one thread. Prints the projection of
this mean on the exact gradient for each group of weights; 1 where all of it is there.
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

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.models import GCNII, NodeClassifier
from lightning_gnnpipe.types import StalenessName

METHODS: tuple[StalenessName, ...] = ("constant", "gnnpipe")  # nothing drifts here
GROUP = 8  # convolutions a row


class MeanGradient(L.Callback):
    """Averages gradients by group of weights, but for those of the first, exact step."""

    def __init__(self, *, skips_first: bool = False) -> None:
        self.skips_first = skips_first
        self.num_steps = 0
        self.sums: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, *_: Any
    ) -> None:
        if self.skips_first and trainer.current_epoch == 0:
            return
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                parts[group_of(name)].append(weight.grad.detach().double().flatten())
        for group, flat in parts.items():
            self.sums[group] = self.sums.get(group, 0) + torch.cat(flat)
        self.num_steps += 1

    def share_of(self, exact: MeanGradient, group: str) -> float:
        """Return the projection on the exact one, in parts of that."""
        whole = exact.sums[group] / exact.num_steps
        return float(self.sums[group] @ whole / self.num_steps / (whole @ whole))


def group_of(name: str) -> str:
    """Return the row of a weight."""
    if ".convs." not in name:
        return name.split(".")[1]
    first = int(name.split(".convs.")[1].split(".")[0]) // GROUP * GROUP
    return f"convs {first + 1}-{first + GROUP}"


def train(
    module: NodeClassifier,
    datamodule: FullGraphDataModule,
    watch: MeanGradient,
    *,
    num_epochs: int,
    staleness: StalenessName = "constant",
    num_chunks: int = 1,
) -> None:
    """Train on random chunks; exactly with one."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(num_chunks=num_chunks, partition="random", staleness=staleness),
        max_epochs=num_epochs,
        callbacks=[watch],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)


def measure(
    datamodule: FullGraphDataModule,
    *,
    num_layers: int,
    num_chunks: int,
    num_epochs: int,
    num_steps: int,
    seed: int,
) -> dict[str, list[float]]:
    """Return the shares of the methods by group of weights."""

    def make(lr: float) -> NodeClassifier:
        L.seed_everything(seed, verbose=False)
        num_classes = datamodule.num_classes
        net = GCNII(datamodule.num_features, 64, num_classes, num_layers, dropout=0.0)
        return NodeClassifier(net, num_classes, lr, 5e-4)

    trained = make(0.01)
    train(trained, datamodule, MeanGradient(), num_epochs=num_epochs)

    def run(watch: MeanGradient, **options: Any) -> MeanGradient:
        module = make(0.0)
        module.load_state_dict(trained.state_dict())
        train(module, datamodule, watch, **options)
        return watch

    exact = run(MeanGradient(), num_epochs=1)
    found = [
        run(
            MeanGradient(skips_first=True),
            num_epochs=1 + num_steps,
            staleness=method,
            num_chunks=num_chunks,
        )
        for method in METHODS
    ]
    return {group: [one.share_of(exact, group) for one in found] for group in exact.sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default=os.environ.get("GNNPIPE_DATA"))
    parser.add_argument("--dataset", default="Cora")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=100, help="exact ones")
    parser.add_argument("--steps", type=int, default=100, help="over which gradients are averaged")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("expected --steps of at least 1")
    torch.set_num_threads(1)
    silence_lightning()
    shares = measure(
        FullGraphDataModule(load_graph(options.dataset, options.root)),
        num_layers=options.layers,
        num_chunks=options.chunks,
        num_epochs=options.epochs,
        num_steps=options.steps,
        seed=options.seed,
    )
    rows = [[group, *(f"{one:.2f}" for one in found)] for group, found in shares.items()]
    print_table(["weights", *METHODS], rows)


if __name__ == "__main__":
    main()
