"""Loaders with equally many batches on all replicas, and access to the next batch.

Replicas average gradients in each step, so a replica without a batch would block all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.trainer import _compat

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


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def look_ahead(trainer: pl.Trainer) -> Callable[[torch.device], Any]:
    """Return what gives the next batch of the loop that `trainer` has begun; None if there is none.

    Not if the user changes batches on their way to the device, or ranks must agree on each.
    """
    owners: list[tuple[Any, type]] = [(trainer.lightning_module, pl.LightningModule)]
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        owners.append((trainer.datamodule, pl.LightningDataModule))  # type: ignore[attr-defined]
    if any(is_overridden(hook, owner, kind) for owner, kind in owners for hook in _HOOKS):
        return no_batch
    fetcher = _compat.fetcher_of(trainer)
    loaders = [] if fetcher is None else fetcher.combined_loader.flattened
    if fetcher is None or any(isinstance(one, SameLengthLoader) for one in loaders):
        return no_batch
    source = fetcher.iterator = _Source(fetcher.iterator)

    def peek(device: torch.device) -> Any:
        fetched = getattr(fetcher, "batches", None)  # prefetched by Lightning
        item = fetched[0] if fetched else source.peek()
        return None if item is None else move_data_to_device(item[0], device)

    return peek


def no_batch(device: torch.device) -> None:
    """Return None: nothing looks ahead."""


class _Source(Iterator[Any]):
    """Iterator with access to the next item; raises a loader's error when its item is due."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._next: list[tuple[Any, Exception | None]] = []

    def __next__(self) -> Any:
        if not self._next:
            return next(self._source)
        item, error = self._next.pop()
        if error is not None:
            raise error
        return item

    def peek(self) -> Any:
        if not self._next:
            try:
                self._next = [(next(self._source), None)]
            except Exception as error:  # raised when its batch is due
                self._next = [(None, error)]
        return self._next[0][0]
