"""Data parallelism: of two replicas, one trains on batches 0, 2, ..., the second on 1, 3, ...

Samplers, gradients, buffers and reductions behave as in Lightning's DDP, with replicas in place of
its processes. The ranks of one replica have the same batch, loss and logged values. Gradients are
averaged in each step, so a replica without a batch would block all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer.processes import Processes


class Replicas:
    """Splits batches over replicas, and reduces values and buffers over them."""

    def __init__(
        self, strategy: _compat.LightningStrategy, processes: Processes, num_replicas: int
    ) -> None:
        self._strategy, self._processes, self._num_replicas = strategy, processes, num_replicas

    @property
    def are_several(self) -> bool:
        return self._num_replicas > 1

    @property
    def sampler_kwargs(self) -> dict[str, int]:
        """`num_replicas` and `rank` of this process, for a `DistributedSampler`."""
        size = max(self._strategy.world_size // self._num_replicas, 1)
        return {"num_replicas": self._num_replicas, "rank": self._strategy.global_rank // size}

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers of loaders by replica, and check that replicas have equally many batches."""
        is_seeded = int(os.environ.get("PL_SEED_WORKERS", 0)) == 1
        replica = self.sampler_kwargs["rank"]
        if is_seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
        if not self.are_several or self._predicts:
            return dataloader
        gather = partial(self._processes.everyone.meet, "compare loaders")
        checked = SameLengthLoader(dataloader, gather)
        is_even = self._is_split_evenly(dataloader)
        return dataloader if all(even for [even] in gather([is_even])) else checked

    @property
    def _predicts(self) -> bool:
        """Whether replicas may have different numbers of batches, since nothing is reduced."""
        return self._strategy.user_module.trainer.state.fn == TrainerFn.PREDICTING

    def _is_split_evenly(self, dataloader: object) -> bool:
        """Whether a sampler that Lightning has put in gives all replicas equally many batches."""
        if not isinstance(dataloader, DataLoader):
            return False
        is_plain = type(dataloader.batch_sampler) in (BatchSampler, type(None))
        sampler = dataloader.sampler
        if not is_plain or not isinstance(sampler, DistributedSampler):
            return False
        return sampler.num_replicas == self._num_replicas

    def over(self, tensor: Any, group: Any | None, work: Callable[[Tensor, Any], Any]) -> Any:
        """Return what the collective `work` makes of `tensor`, over replicas or over `group`."""
        if not isinstance(tensor, Tensor) or not self._processes.has_peers:
            return tensor
        return self._processes.transport.asked.over(tensor, group, work)

    def share_buffers(self) -> None:
        """Copy the first replica's buffers to all replicas, as DDP does before each step."""
        if not self.are_several:
            return
        over = self._processes.transport.replicas
        over.broadcast_all(self._strategy.user_module.buffers(), over.members.ranks[0])

    @contextmanager
    def computing_metrics(self) -> Iterator[None]:
        """Let all torchmetrics, wherever they are held, compute over replicas, not over all ranks.

        Ranks of a replica have the same numbers.
        """
        several, sync = self.are_several, Metric.sync

        def gather(state: Tensor, group: Any | None = None) -> list[Tensor]:
            return self._processes.transport.asked.over(state, group, gather_all_tensors)

        def sync_replicas(
            metric: Metric,
            dist_sync_fn: Any = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Any = None,
        ) -> None:
            if several:
                how = dist_sync_fn or gather, process_group, should_sync, lambda: True
                sync(metric, *how)

        setattr(Metric, "sync", sync_replicas)  # noqa: B010
        try:
            yield
        finally:
            setattr(Metric, "sync", sync)  # noqa: B010


Gather = Callable[[Sequence[int]], list[list[int]]]

_UNKNOWN = -1
_END = object()


class SameLengthLoader:
    """Wraps a loader; raises ConfigError if ranks have different numbers of batches."""

    def __init__(self, loader: Any, gather: Gather) -> None:
        self.loader, self._gather = loader, gather
        try:
            length = len(loader)
        except (TypeError, NotImplementedError):
            length = _UNKNOWN
        lengths = [one for [one] in gather([length])]
        if len(set(lengths)) > 1:
            _refuse(", ".join("unknown" if one == _UNKNOWN else str(one) for one in lengths))

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # during copying or unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; raise ConfigError if only some ranks have one left."""
        batches = iter(self.loader)
        for number in count():
            batch = next(batches, _END)
            votes = [vote for [vote] in self._gather([batch is not _END])]
            if len(set(votes)) > 1:
                _refuse(", ".join(f"more than {number}" if vote else str(number) for vote in votes))
            if batch is _END:
                return
            yield batch


def _refuse(found: str) -> None:
    raise ConfigError(
        expected="the same number of batches on all ranks",
        found=f"{found}, by rank",
        remedy="Use Lightning's DistributedSampler, or pass "
        "strategy.distributed_sampler_kwargs to a sampler or data set of your own.",
    )
