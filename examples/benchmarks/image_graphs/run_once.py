"""One run over mini-batches of image graphs, measured: seconds a mini-batch and losses, as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import IterableDataset
from torch_geometric.data import Batch

sys.path.append(str(Path(__file__).parents[2]))
from images import ImageGraphs, load_images
from vig import PixelViG

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.models import GraphClassifier


class Ready(IterableDataset[Any]):
    """Mini-batches that are in memory: what is timed is not how they are made."""

    def __init__(self, batches: list[Batch], number: int) -> None:
        self._batches, self._number = batches, number

    def __iter__(self) -> Iterator[Batch]:
        return (self._batches[i % len(self._batches)] for i in range(self._number))

    def __len__(self) -> int:
        return self._number


class Measure(L.Callback):
    """Times mini-batches, from the end of one to the end of the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"losses": [], "training_s": [], "test_s": [], "events": []}
        self._last_s = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._last_s = time.perf_counter()

    def on_test_start(self, *_: Any) -> None:
        self._last_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._note("training_s")
        self.found["losses"].append(float(outputs["loss"]))
        if isinstance(trainer.strategy, GNNPipeStrategy):
            events = trainer.strategy.collect_stats().events
            self.found["events"] = [(e.phase, (e.end_us - e.start_us) / 1e6) for e in events]
            self._last_s = time.perf_counter()

    def on_test_batch_end(self, *_: Any) -> None:
        self._note("test_s")

    def _note(self, key: str) -> None:
        now_s = time.perf_counter()
        self.found[key].append(now_s - self._last_s)
        self._last_s = now_s

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.found))


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batches = make_batches(options)
    L.seed_everything(0, verbose=False)
    module = GraphClassifier(PixelViG(batches[0].x.size(1)), num_classes=10)
    strategy: Any = "auto"
    if options.micro_batches:
        strategy = GNNPipeStrategy(num_chunks=options.micro_batches, start_method="fork")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        trainer = L.Trainer(
            accelerator="cpu",
            devices=options.stages,
            strategy=strategy,
            max_epochs=1,
            callbacks=[Measure(path)],
            precision=options.precision,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        if options.mode == "train":
            trainer.fit(module, Ready(batches, options.warm + options.steps))
        else:
            trainer.test(module, Ready(batches, options.warm + options.steps), verbose=False)
        found = json.loads(path.read_text())
    for key in ("training_s", "test_s"):
        found[key] = found[key][options.warm :]
    print(json.dumps(found))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--mode", choices=["train", "test"], default="train")
    add("--dataset", choices=["cifar10", "digits"], default="cifar10")
    add("--root")
    add("--stages", type=int, default=1)
    add("--micro-batches", type=int, default=0, help="0: plain Trainer")
    add("--batch-size", type=int, default=20, help="images in a mini-batch")
    add("--precision", choices=["32-true", "64-true"], default="32-true")
    add("--num-batches", type=int, default=4, help="mini-batches that are gone through in turn")
    add("--warm", type=int, default=2, help="mini-batches that are not timed")
    add("--steps", type=int, default=8)
    return parser.parse_args()


def make_batches(options: argparse.Namespace) -> list[Batch]:
    images, labels = load_images(options.dataset, options.root)[0]
    graphs = ImageGraphs((images, labels), patch=1, has_edges=True)
    size = options.batch_size
    batches = [
        Batch.from_data_list([graphs[i] for i in range(first, first + size)])
        for first in range(0, size * options.num_batches, size)
    ]
    if options.precision == "64-true":
        for batch in batches:  # Lightning converts tensors in tuples and dicts, not those of graphs
            batch.x = batch.x.double()
    return batches


if __name__ == "__main__":
    main()
