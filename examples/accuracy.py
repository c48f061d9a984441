"""Does staleness cost accuracy? A deep network, exact and pipelined, over data sets and seeds.

    python examples/accuracy.py --root DIR --datasets Cora CiteSeer PubMed --seeds 0 1 2

Staleness depends on the chunks and their order alone, never on the number of stages, so one process
with one stage trains what any number of them would. All runs have the same initial weights,
optimizer and number of epochs; each is tested with the weights of its best validation accuracy.
Exact training runs twice, in a plain Trainer and under the strategy: they differ in the random
numbers of dropout alone, and so show how much of a difference is chance. Prints a table and writes
every run to OUTPUT/accuracy.csv; runs that are there already are not made again. `--model
resgcnplus-batch` has norms over all nodes (BatchNorm).

`--modes` names what is compared with exact training: "pipeline", in chunks; "hybrid", in chunks on
2 shards of the graph (in one stage; with more of them the numbers are the same); and on 2 shards
without chunks (graph parallelism): "graph" is exact, "int1" sends one bit a value between shards,
"async" uses rows of the last epoch, and "int1-async" is both.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: layers this small gain from no more

import argparse
import csv
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import lightning as L
import torch
from graphs import load_graph
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import silence_lightning
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_gnnpipe import (
    EmbeddingRefresh,
    FullGraphDataModule,
    GNNPipeStrategy,
    StalenessWarmup,
)
from lightning_gnnpipe.models import GCNII, NodeClassifier, ResGCNPlus
from lightning_gnnpipe.types import CodecOption, StalenessName


@dataclass(frozen=True)
class Setting:
    """A run but for its data and seed; the defaults are GCNII's, with 64 channels for all.

    The other models have no weight decay of their own, so that it is the same for all layers.

    Source: GCNII (https://arxiv.org/abs/2007.02133), its settings for Cora.
    """

    model: str = "gcnii"
    num_epochs: int = 300
    num_chunks: int | None = None  # None: exact, by the plain Trainer
    num_exact_epochs: int = 10
    staleness: StalenessName = "drift"
    num_shards: int = 1
    halo_codec: CodecOption = "fp32"
    async_halo: bool = False
    num_layers: int = 32
    hidden_channels: int = 64
    dropout: float = 0.6
    lr: float = 0.01
    conv_decay: float = 0.01
    linear_decay: float = 5e-4


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gcnii": GCNII,
    "resgcnplus": ResGCNPlus,
    "resgcnplus-batch": partial(ResGCNPlus, norm="batch"),
}


CODECS: dict[str, CodecOption] = {"int1": "int1"}
MODES = ["pipeline", "hybrid", "graph", *CODECS, "async", *(f"{name}-async" for name in CODECS)]


class DeepClassifier(NodeClassifier):
    """A NodeClassifier whose convolutions decay more than its linear maps, as in the paper."""

    def __init__(
        self, net: nn.Module, num_classes: int, lr: float, weight_decay: float, conv_decay: float
    ) -> None:
        super().__init__(net, num_classes, lr, weight_decay)
        self.conv_decay = conv_decay

    def configure_optimizers(self) -> torch.optim.Optimizer:
        convs: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            (convs if name.startswith("net.convs.") else others).append(parameter)
        groups = [
            {"params": convs, "weight_decay": self.conv_decay},
            {"params": others, "weight_decay": self.weight_decay},
        ]
        return torch.optim.Adam(groups, lr=self.lr)


def train_once(datamodule: FullGraphDataModule, setting: Setting, seed: int) -> float:
    """Return the test accuracy, between 0 and 1, at the best validation accuracy of one run."""
    L.seed_everything(seed, verbose=False)
    net = MODELS[setting.model](
        datamodule.num_features,
        setting.hidden_channels,
        datamodule.num_classes,
        setting.num_layers,
        setting.dropout,
    )
    conv_decay = setting.conv_decay if setting.model == "gcnii" else setting.linear_decay
    module = DeepClassifier(
        net, datamodule.num_classes, setting.lr, setting.linear_decay, conv_decay
    )
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_acc", mode="max", save_weights_only=True)
        callbacks: list[L.Callback] = [best]
        strategy: GNNPipeStrategy | str = "auto"
        if setting.num_chunks is not None:
            strategy = GNNPipeStrategy(
                graph_parallel=setting.num_shards,
                num_chunks=setting.num_chunks,
                staleness=setting.staleness,
                halo_codec=setting.halo_codec,
                async_halo=setting.async_halo,
                start_method="fork",
            )
            callbacks.append(StalenessWarmup(num_epochs=setting.num_exact_epochs))
            if setting.model != "resgcnplus-batch" and not setting.async_halo:
                callbacks.append(EmbeddingRefresh(every_n_epochs=1))  # of the validation
        trainer = L.Trainer(
            accelerator="cpu",
            devices=setting.num_shards,
            strategy=strategy,
            max_epochs=setting.num_epochs,
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=datamodule)
        [metrics] = trainer.test(module, datamodule=datamodule, ckpt_path="best", verbose=False)
    return metrics["test_acc"]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    silence_lightning()
    base = Setting(options.model, options.epochs, num_layers=options.layers)
    settings = {
        "exact, plain Trainer": base,
        "exact, strategy": replace(
            base, num_chunks=options.chunks, num_exact_epochs=options.epochs
        ),
        **{mode: make_mode(mode, base, options) for mode in options.modes},
    }
    accuracies: dict[tuple[str, str], list[float]] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output / "accuracy.csv")
    for dataset in options.datasets:
        datamodule = FullGraphDataModule(load_graph(dataset, options.root))
        for seed in options.seeds:
            for run, setting in settings.items():
                test_acc = results.find(dataset, seed, setting)
                if test_acc is None:
                    test_acc = train_once(datamodule, setting, seed)
                    results.add(dataset, run, seed, setting, test_acc)
                accuracies.setdefault((dataset, run), []).append(test_acc)
    Console().print(build_table(accuracies, options))


class Results:
    """The file of all runs, a row a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_run: dict[tuple[str, ...], float] = {}
        header = ["dataset", "seed", "run", *(field.name for field in fields(Setting)), "test_acc"]
        if not path.exists():
            self._append(header)
            return
        with path.open(newline="") as file:
            found, *rows = csv.reader(file)
        if found != header:
            raise SystemExit(f"{path} has other columns than this program's. Move it elsewhere.")
        for dataset, seed, _, *setting, test_acc in rows:
            self._by_run[(dataset, seed, *setting)] = float(test_acc)

    def find(self, dataset: str, seed: int, setting: Setting) -> float | None:
        """Return the test accuracy of a run, if it has been made."""
        return self._by_run.get((dataset, str(seed), *map(str, astuple(setting))))

    def add(self, dataset: str, run: str, seed: int, setting: Setting, test_acc: float) -> None:
        """Write down a run."""
        self._append([dataset, seed, run, *map(str, astuple(setting)), f"{test_acc:.4f}"])

    def _append(self, row: list[Any]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(row)


def make_mode(mode: str, base: Setting, options: argparse.Namespace) -> Setting:
    """Return the setting of one of `MODES`."""
    setting = replace(base, num_exact_epochs=options.exact_epochs)
    if mode in ("pipeline", "hybrid"):
        setting = replace(setting, num_chunks=options.chunks, staleness=options.staleness)
        return replace(setting, num_shards=2) if mode == "hybrid" else setting
    codec = CODECS.get(mode.removesuffix("-async"), "fp32")
    is_async = mode.endswith("async")
    return replace(setting, num_chunks=1, num_shards=2, halo_codec=codec, async_halo=is_async)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--datasets", nargs="+", default=["Cora", "CiteSeer", "PubMed"])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--model", choices=MODELS, default="gcnii")
    add("--layers", type=int, default=32, help="layers of the model (default: 32)")
    add("--epochs", type=int, default=300, help="epochs of each run (default: 300)")
    add("--modes", nargs="+", choices=MODES, default=["pipeline"], help="see above")
    add("--chunks", type=int, default=8, help="chunks of the pipeline (default: 8)")
    add("--exact-epochs", type=int, default=10, help="exact first epochs of it (default: 10)")
    add("--staleness", choices=get_args(StalenessName), default="drift", help="method")
    add("--output", type=Path, default=Path("outputs"), help="folder of accuracy.csv")
    return parser.parse_args()


def build_table(
    accuracies: dict[tuple[str, str], list[float]], options: argparse.Namespace
) -> Table:
    """Return mean and standard deviation over the seeds, a row a run."""
    runs = list(dict.fromkeys(run for _, run in accuracies))
    table = Table(
        title=f"{options.model}, {options.layers} layers: test accuracy [%], mean and standard "
        f"deviation of {len(options.seeds)} seeds, {options.epochs} epochs"
    )
    for name in ("", "run", "accuracy", "to exact"):
        table.add_column(name, justify="left" if name in ("", "run") else "right")
    for dataset in options.datasets:
        of_runs = {run: [100 * acc for acc in accuracies[dataset, run]] for run in runs}
        exact = statistics.mean(of_runs[runs[0]])
        for run, accs in of_runs.items():
            spread = statistics.stdev(accs) if len(accs) > 1 else 0.0
            mean = statistics.mean(accs)
            change = "" if run == runs[0] else f"{mean - exact:+.1f}"
            table.add_row("" if change else dataset, run, f"{mean:.1f} ± {spread:.1f}", change)
    return table


if __name__ == "__main__":
    main()
