"""One cell, trained by one method, for some seeds one after the other: a process of one thread.

    python run_cell.py --cell gcn-batch --method default --seeds 0,1,2 --root DIR

Prints one line of JSON a seed. What is computed depends on the chunks, never on the number of
stages, so one process trains what any number of them would. Exits with 3 if the graph is not there.
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
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

sys.path += [str(folder) for folder in Path(__file__).parents[1:3]]
from panel import Cell, read_cells
from quiet import silence_lightning
from resumable import NO_GRAPH
from tasks import make_data, make_task

from lightning_gnnpipe import (
    EmbeddingRefresh,
    FullGraphDataModule,
    GNNPipeStrategy,
    StalenessWarmup,
)

NUM_FINAL = 5  # epochs whose mean is the final metric
WARMUP = partial(StalenessWarmup, num_epochs=5)

# Options of the strategy beside those of the cell, and callbacks, made anew for each run.
Method = tuple[Mapping[str, Any], tuple[Any, ...]]
METHODS: dict[str, Method] = {
    "exact": ({"num_chunks": 1}, ()),
    "default": ({}, ()),
    "warmup": ({}, (WARMUP,)),
    "refresh": ({}, (WARMUP, partial(EmbeddingRefresh, every_n_epochs=1))),
    "constant": ({"staleness": "constant"}, ()),
}


def find_method(name: str, cell: Cell) -> Method:
    """Return a method of `METHODS`, or of the environment's SAFETY_METHODS.

    That is JSON, from names to options of the strategy; `warmup` is the number of exact epochs.
    The recipe refreshes embeddings where that costs no forward pass.
    """
    if name == "recipe":
        name = "refresh" if cell.gives_embeddings else "warmup"
    given = json.loads(os.environ.get("SAFETY_METHODS", "{}"))
    if name not in given:
        if name not in METHODS:
            known = ", ".join(["recipe", *METHODS, *given])
            raise ValueError(f"Expected a method among {known} (got {name!r}).")
        return METHODS[name]
    options = dict(given[name])
    callbacks = (partial(StalenessWarmup, num_epochs=options.pop("warmup", 1)),)
    return options, callbacks


class Curves(L.Callback):
    """The loss of each training step, and the metric of each validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.metrics.append(float(trainer.callback_metrics["val_metric"]))


def run(cell: Cell, method: str, seed: int, datamodule: FullGraphDataModule) -> dict[str, Any]:
    """Train once; return what is a row of results.csv."""
    L.seed_everything(seed, verbose=False)
    module = make_task(cell, datamodule)
    options, callbacks = find_method(method, cell)
    curves = Curves()
    start = time.process_time()  # of one thread: other work on the machine does not count
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(
            **{"num_chunks": cell.chunks, "partition": cell.partition, **options}
        ),
        callbacks=[*(make() for make in callbacks), curves],
        max_epochs=cell.epochs,
        limit_val_batches=1.0 if cell.validate else 0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)
    if not cell.validate:
        trainer.limit_val_batches = 1.0
        trainer.validate(module, datamodule=datamodule, verbose=False)
    return {
        "cell": cell.name,
        "method": method,
        "seed": seed,
        **summarize(curves, cell.lower_is_better),
        "seconds": round(time.process_time() - start, 2),
    }


def summarize(curves: Curves, lower_is_better: bool) -> dict[str, float]:
    """Return the best and the final metric, and what the training loss did.

    A jump is how far the loss of an epoch is above the least one before it. A loss that is no
    number counts as infinite.
    """
    losses = [loss if math.isfinite(loss) else math.inf for loss in curves.losses]
    jumps = [losses[epoch] - min(losses[:epoch]) for epoch in range(1, len(losses))]
    numbers = [metric for metric in curves.metrics if math.isfinite(metric)] or [math.nan]
    found = {
        "best": (min if lower_is_better else max)(numbers),
        "final": statistics.mean(curves.metrics[-NUM_FINAL:]),
        "first_loss": losses[0],
        "final_loss": statistics.mean(losses[-NUM_FINAL:]),
        "largest_jump": max(jumps),
        "largest_loss": max(losses),
    }
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default=os.environ.get("GNNPIPE_DATA"))
    parser.add_argument("--cell", required=True)
    parser.add_argument("--method", default="default")
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    silence_lightning()
    warnings.filterwarnings("ignore", module="lightning")
    (cell,) = read_cells(options.cell)
    try:
        datamodule = make_data(cell, options.root)
    except OSError as error:
        print(f"{cell.graph}: {error}", file=sys.stderr)
        sys.exit(NO_GRAPH)
    for seed in options.seeds.split(","):
        print(json.dumps(run(cell, options.method, int(seed), datamodule)), flush=True)


if __name__ == "__main__":
    main()
