"""Train through the public API, as a user does, and return what each step did."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.staleness import StalenessMethod
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import (
    Named,
    Step,
    StepRecorder,
    assert_steps_equal,
    merge_ranks,
    noting_calls,
)
from tests.helpers.trainers import quiet_trainer

SEED = 7


@dataclass(frozen=True)
class FitResult:
    """What ``trainer.fit`` did, over all ranks."""

    steps: list[Step]
    """Of the first rank; the others have equal gradients and weights."""
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
    batches_per_epoch: int = 1,
    strategy_kwargs: dict[str, Any] | None = None,
    method: StalenessMethod | None = None,
    **options: Any,
) -> FitResult:
    """Train under ``GNNPipeStrategy`` on the CPU; more than one rank are forked processes.

    Args:
        partition: Chunk of each node; None leaves the choice to the strategy.
        batches_per_epoch: How often an epoch yields the graph, for accumulating gradients.
        method: How staleness is met, if not as ``strategy_kwargs`` say.
        options: Those of `_fit`.
    """

    class Repeated(FullGraphDataModule):
        def train_dataloader(self) -> Any:
            return BatchList([self.data] * batches_per_epoch)

    datamodule = (FullGraphDataModule if batches_per_epoch == 1 else Repeated)(data)
    piped = {"graph_parallel": num_shards, "num_chunks": num_chunks, "method": method}
    if partition is not None:
        piped["partition"] = partition
    piped |= strategy_kwargs or {}
    return _fit(module, (datamodule,), num_stages * num_shards, piped, **options)


def run_plain(
    module: ReferenceModule, data: Data, *, batches_per_epoch: int = 1, **options: Any
) -> FitResult:
    """Train under plain Lightning, on one device, with nothing of this package."""
    return _fit(module, (BatchList([data] * batches_per_epoch), BatchList([data])), **options)


def fit_batches(
    module: L.LightningModule,
    batches: Iterable[Any] | L.LightningDataModule,
    *,
    num_stages: int = 0,
    num_replicas: int = 1,
    num_chunks: int = 1,
    max_epochs: int = 1,
    trainer_kwargs: dict[str, Any] | None = None,
    strategy_kwargs: dict[str, Any] | None = None,
    val_batches: Iterable[Any] | None = None,
    **options: Any,
) -> FitResult:
    """Train on batches of graphs, in forked processes.

    0 stages are plain Lightning: with several replicas, its DDP.

    Args:
        batches: A loader, a list, or a data module.
        val_batches: Another, to validate on.
        options: Those of `_fit`.
    """
    trainer_kwargs, piped = {"max_epochs": max_epochs, **(trainer_kwargs or {})}, None
    if num_stages:
        piped = {"num_chunks": num_chunks, "data_parallel": num_replicas, **(strategy_kwargs or {})}
    elif num_replicas > 1:
        trainer_kwargs["strategy"] = "ddp_fork_find_unused_parameters_true"
    return _fit(
        module,
        [BatchList(one) if isinstance(one, list) else one for one in (batches, val_batches)],
        max(num_stages, 1) * num_replicas,
        piped,
        num_replicas=num_replicas,
        trainer_kwargs=trainer_kwargs,
        **options,
    )


def _fit(
    module: L.LightningModule,
    loaders: Sequence[Any],
    num_ranks: int = 1,
    piped: dict[str, Any] | None = None,
    *,
    tmp_path: Path,
    num_replicas: int = 1,
    callbacks: Sequence[L.Callback] = (),
    seed: int = SEED,
    seeds_workers: bool = False,
    trainer_kwargs: dict[str, Any] | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> FitResult:
    """Train, record all steps on all ranks, and merge those of each replica.

    Args:
        loaders: To train and to validate on, or a data module.
        piped: See `quiet_trainer`.
        options: More for the Trainer, such as `max_epochs`.
    """
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    L.seed_everything(seed, workers=seeds_workers, verbose=False)
    options |= {"num_sanity_val_steps": 0, "limit_val_batches": 0, "default_root_dir": tmp_path}
    with noting_calls() as called:
        options |= {
            **(trainer_kwargs or {}),
            "callbacks": [*callbacks, StepRecorder(folder, called)],
        }
        trainer = quiet_trainer(num_ranks, piped, **options)
        if isinstance(loaders[0], L.LightningDataModule):
            trainer.fit(module, datamodule=loaders[0], ckpt_path=ckpt_path)
        else:
            trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    size = num_ranks // num_replicas
    steps, *others = [merge_ranks(ranks[i : i + size]) for i in range(0, num_ranks, size)]
    return FitResult(
        steps=steps,
        others=others,
        state_dict={name: value.detach().clone() for name, value in module.state_dict().items()},
        trainer=trainer,
    )


def assert_transparent(piped: FitResult, plain: FitResult) -> None:
    """Compare all steps, and the weights at the end."""
    assert_steps_equal(piped.steps, plain.steps)
    torch.testing.assert_close(piped.state_dict, plain.state_dict, rtol=1e-10, atol=1e-10)
    found, wanted = piped.trainer.callback_metrics, plain.trainer.callback_metrics
    assert found.keys() & {"train_loss", "val_loss"} == wanted.keys() & {"train_loss", "val_loss"}


def assert_shared_out(piped: FitResult, plain: FitResult) -> None:
    """No rank does the whole work of the last step: each calls the layers of its stage."""
    [names], ranks = plain.steps[-1].called, piped.steps[-1].called
    assert set.union(*ranks) == names
    assert all(called and called < names for called in ranks)


class BatchList(Iterable[Any]):
    """Yield batches in order; for Lightning a list would be several loaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
