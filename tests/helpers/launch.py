"""Train through the public API, as a user does, and return what each step did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from torch_geometric.data import Data

from tests.helpers.modules import ReferenceModule
from tests.helpers.record import (
    Named,
    Step,
    StepRecorder,
    assert_steps_equal,
    load_ranks,
    merge_ranks,
)

if TYPE_CHECKING:
    from lightning_gnnpipe.staleness import StalenessMethod

SEED = 7


@dataclass(frozen=True)
class FitResult:
    """What ``trainer.fit`` did, over all ranks."""

    steps: list[Step]
    """Merged: gradients and weights of all parameters, whichever rank holds them."""
    held_by_rank: list[set[str]]
    """Names of the parameters that each rank holds."""
    state_dict: Named
    """Of the module, in the process that called ``fit``, after it."""
    trainer: L.Trainer
    others: list[list[Step]] = field(default_factory=list)
    """The steps of each replica but the first, likewise."""

    @property
    def losses(self) -> Tensor:
        return torch.stack([step.loss for step in self.steps])


def run_fit(
    module: ReferenceModule,
    data: Data,
    *,
    num_stages: int,
    num_chunks: int,
    num_shards: int = 1,
    partition: Tensor | None = None,
    callbacks: Sequence[L.Callback] = (),
    max_epochs: int,
    tmp_path: Path,
    seed: int = SEED,
    batches_per_epoch: int = 1,
    trainer_kwargs: dict[str, Any] | None = None,
    strategy_kwargs: dict[str, Any] | None = None,
    method: StalenessMethod | None = None,
) -> FitResult:
    """Train under ``GNNPipeStrategy`` on the CPU; more than one rank are forked processes.

    Args:
        partition: Chunk of each node; None leaves the choice to the strategy.
        batches_per_epoch: How often an epoch yields the graph, for accumulating gradients.
        method: How staleness is met, if not as ``strategy_kwargs`` say.
    """
    from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
    from tests.helpers.methods import with_method

    class Repeated(FullGraphDataModule):
        def train_dataloader(self) -> Any:
            return RepeatedGraph(self.data, batches_per_epoch)

    options = dict(strategy_kwargs or {})
    if partition is not None:
        options["partition"] = partition
    num_ranks = num_stages * num_shards
    strategy = GNNPipeStrategy(
        graph_parallel=num_shards,
        num_chunks=num_chunks,
        start_method="fork",
        **options,
    )
    if method is not None:
        with_method(strategy, method)
    datamodule = (FullGraphDataModule if batches_per_epoch == 1 else Repeated)(data)
    folder = _empty_folder(tmp_path, f"stages_{num_stages}")
    with _one_thread():
        L.seed_everything(seed, verbose=False)
        trainer = L.Trainer(
            devices=num_ranks,
            strategy=strategy,
            callbacks=[*callbacks, StepRecorder(folder)],
            max_epochs=max_epochs,
            **_quiet(tmp_path, trainer_kwargs),
        )
        trainer.fit(module, datamodule=datamodule)
    return _result(trainer, module, folder, num_ranks)


def run_plain(
    module: ReferenceModule,
    data: Data,
    *,
    callbacks: Sequence[L.Callback] = (),
    max_epochs: int,
    tmp_path: Path,
    seed: int = SEED,
    batches_per_epoch: int = 1,
    trainer_kwargs: dict[str, Any] | None = None,
) -> FitResult:
    """Train under plain Lightning, on one device, with nothing of this package."""
    folder = _empty_folder(tmp_path, "plain")
    with _one_thread():
        L.seed_everything(seed, verbose=False)
        trainer = L.Trainer(
            devices=1,
            callbacks=[*callbacks, StepRecorder(folder)],
            max_epochs=max_epochs,
            **_quiet(tmp_path, trainer_kwargs),
        )
        trainer.fit(module, RepeatedGraph(data, batches_per_epoch), RepeatedGraph(data, 1))
    return _result(trainer, module, folder, 1)


def fit_batches(
    module: L.LightningModule,
    batches: Iterable[Any] | L.LightningDataModule,
    *,
    tmp_path: Path,
    num_stages: int = 0,
    num_replicas: int = 1,
    num_chunks: int = 1,
    max_epochs: int = 1,
    seed: int = SEED,
    callbacks: Sequence[L.Callback] = (),
    trainer_kwargs: dict[str, Any] | None = None,
    strategy_kwargs: dict[str, Any] | None = None,
    val_batches: Iterable[Any] | None = None,
    ckpt_path: Path | None = None,
    seeds_workers: bool = False,
) -> FitResult:
    """Train on batches of graphs, in forked processes.

    0 stages are plain Lightning: with several replicas, its DDP.

    Args:
        batches: A loader, a list, or a data module.
        val_batches: Another, to validate on.
    """
    from lightning_gnnpipe import GNNPipeStrategy

    strategy: Any = "auto" if num_replicas == 1 else "ddp_fork"
    if num_stages:
        strategy = GNNPipeStrategy(
            num_chunks=num_chunks,
            data_parallel=num_replicas,
            start_method="fork",
            **(strategy_kwargs or {}),
        )
    folder = _empty_folder(tmp_path, f"batches_{num_stages}")
    num_ranks = max(num_stages, 1) * num_replicas
    with _one_thread():
        L.seed_everything(seed, workers=seeds_workers, verbose=False)
        trainer = L.Trainer(
            devices=num_ranks,
            strategy=strategy,
            callbacks=[*callbacks, StepRecorder(folder)],
            **_quiet(tmp_path, {"max_epochs": max_epochs, **(trainer_kwargs or {})}),
        )
        trainer.fit(
            module,
            BatchList(batches) if isinstance(batches, list) else batches,
            BatchList(val_batches) if isinstance(val_batches, list) else val_batches,
            ckpt_path=ckpt_path,
        )
    return _result(trainer, module, folder, num_ranks, num_replicas)


def assert_transparent(piped: FitResult, plain: FitResult) -> None:
    """Compare all steps, and the weights at the end."""
    assert_steps_equal(piped.steps, plain.steps)
    assert piped.state_dict.keys() == plain.state_dict.keys()
    for name, value in plain.state_dict.items():
        torch.testing.assert_close(piped.state_dict[name], value, rtol=1e-10, atol=1e-10)


class BatchList(Iterable[Any]):
    """Yield batches in order; for Lightning a list would be several loaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class RepeatedGraph(Iterable[Data]):
    """Yield the same graph some times an epoch."""

    def __init__(self, data: Data, num_batches: int) -> None:
        self.data = data
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Data]:
        return iter([self.data] * self.num_batches)

    def __len__(self) -> int:
        return self.num_batches


def _quiet(tmp_path: Path, trainer_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": tmp_path,
        **(trainer_kwargs or {}),
    }


def _empty_folder(tmp_path: Path, name: str) -> Path:
    number = len(list(tmp_path.glob(f"{name}_fit_*")))
    folder = tmp_path / f"{name}_fit_{number}"
    folder.mkdir()
    return folder


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _result(
    trainer: L.Trainer,
    module: L.LightningModule,
    folder: Path,
    num_ranks: int,
    num_replicas: int = 1,
) -> FitResult:
    ranks = load_ranks(folder, num_ranks)
    size = num_ranks // num_replicas
    steps, *others = [merge_ranks(ranks[i : i + size]) for i in range(0, num_ranks, size)]
    return FitResult(
        steps=steps,
        others=others,
        held_by_rank=[set(steps[-1].weights) for steps in ranks],
        state_dict={name: value.detach().clone() for name, value in module.state_dict().items()},
        trainer=trainer,
    )
