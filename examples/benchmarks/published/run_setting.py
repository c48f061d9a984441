"""One setting, trained once by one method: a process of one thread, on the CPU or one GPU.

    python run_setting.py --setting cora-gcnii --method pipeline --seed 0 --root DIR

Prints one line of JSON. What is computed depends on the chunks, never on the number of stages, so
one process trains what any number of them would. Exits with 3 if the graph is not there.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import json
import math
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping

sys.path += [str(folder) for folder in Path(__file__).parents[1:3]]
from quiet import silence_lightning
from resumable import NO_GRAPH
from settings import Published, Setting, make_data, read_settings

from lightning_gnnpipe import EmbeddingRefresh, GNNPipeStrategy, StalenessWarmup

METHODS = ("exact", "pipeline", "compare")  # one chunk; K chunks; one chunk with a plain Trainer
COLUMNS = (
    *("setting", "method", "seed", "test", "val", "last_test"),
    *("best_epoch", "epochs", "difference", "cpu_s", "device"),
)
NUM_EXACT = 5  # epochs without staleness at first
NUM_COMPARED = 20  # epochs


class Curves(L.Callback):
    """What each epoch logs."""

    def __init__(self) -> None:
        self.train_losses: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.train_losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.epochs.append({name: float(v) for name, v in trainer.callback_metrics.items()})

    def best(self, select: str) -> int:
        """Return the epoch, from 0, of the least loss or the best metric; the first of equals."""
        if select == "loss":
            values = [-epoch["val_loss"] for epoch in self.epochs]
        else:
            values = [epoch["val_metric"] for epoch in self.epochs]
        return max(
            range(len(values)), key=lambda i: -math.inf if math.isnan(values[i]) else values[i]
        )


def train(
    setting: Setting,
    method: str,
    seed: int,
    root: str | None,
    *callbacks: L.Callback,
    num_stages: int = 1,
    validates: bool = True,
    accelerator: str = "cpu",
) -> None:
    """Train once.

    Args:
        setting: What is trained.
        method: "exact", "pipeline", or "plain", which is a Trainer without the strategy.
        seed: Of weights and dropout, and of the split where there are several.
        root: Folder of raw data sets.
        callbacks: Of the Trainer.
        num_stages: Devices of the pipeline.
        validates: Whether each epoch is validated.
        accelerator: Of the Trainer.
    """
    datamodule = make_data(setting, seed, root)
    if accelerator == "gpu":
        datamodule.data = datamodule.data.to("cuda")  # once, not in each step
    L.seed_everything(seed, verbose=False)
    module = Published(setting, datamodule.num_features, datamodule.num_classes)
    own: list[L.Callback] = []
    if setting.patience and validates:
        own.append(EarlyStopping("val_loss", patience=setting.patience, min_delta=0.0))
    strategy: Any = "auto"
    if method == "exact":
        strategy = GNNPipeStrategy(num_chunks=1)
    elif method == "pipeline":
        strategy = GNNPipeStrategy(num_chunks=setting.chunks, partition="metis")
        own.append(StalenessWarmup(NUM_EXACT))
        if validates and setting.net.get("norm") != "batch":  # else it costs a forward pass
            own.append(EmbeddingRefresh(every_n_epochs=1))
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=num_stages,
        strategy=strategy,
        callbacks=[*callbacks, *own],
        max_epochs=setting.epochs,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validates else 0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)


def summarize(curves: Curves, select: str) -> dict[str, Any]:
    """Return what is reported of a run."""
    best = curves.best(select)
    return {
        "test": round(100 * curves.epochs[best]["test_metric"], 3),
        "val": round(100 * curves.epochs[best]["val_metric"], 3),
        "last_test": round(100 * curves.epochs[-1]["test_metric"], 3),
        "best_epoch": best + 1,
        "epochs": len(curves.epochs),
    }


def compare(setting: Setting, seed: int, root: str | None, accelerator: str = "cpu") -> float:
    """Return the largest relative difference of an epoch's loss between exact and plain training.

    Without dropout, of which both draw other numbers, and in float64.
    """
    net = {**setting.net, "input_dropout": 0.0} if setting.model == "GNN" else setting.net
    setting = replace(setting, dropout=0.0, net=net, epochs=NUM_COMPARED)
    torch.set_default_dtype(torch.float64)
    plain, exact = Curves(), Curves()
    train(setting, "plain", seed, root, plain, accelerator=accelerator)
    train(setting, "exact", seed, root, exact, accelerator=accelerator)
    pairs = zip(plain.train_losses, exact.train_losses, strict=True)
    return max(abs(one / other - 1) for one, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"))
    add("--setting", required=True)
    add("--method", choices=METHODS, default="pipeline")
    add("--seed", type=int, default=0)
    add("--accelerator", choices=["cpu", "gpu"], default="cpu")
    add("--epochs", type=int, help="instead of the setting's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    silence_lightning()
    warnings.filterwarnings("ignore", module="lightning")
    [setting] = read_settings(options.setting)
    setting = replace(setting, epochs=options.epochs or setting.epochs)
    start = time.process_time()  # of one thread: other work on the machine does not count
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {"setting": setting.name, "method": options.method, "seed": options.seed}
    row["device"] = options.accelerator
    try:
        if options.method == "compare":
            difference = compare(setting, options.seed, options.root, options.accelerator)
            row["difference"] = f"{difference:.1e}"
        else:
            curves = Curves()
            train(
                setting,
                options.method,
                options.seed,
                options.root,
                curves,
                accelerator=options.accelerator,
            )
            row |= summarize(curves, setting.select)
    except FileNotFoundError as error:
        print(f"{setting.graph}: {error}", file=sys.stderr)
        sys.exit(NO_GRAPH)
    row["cpu_s"] = round(time.process_time() - start, 1)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
