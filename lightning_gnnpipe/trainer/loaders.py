"""Loaders of replicas with as many batches each, and a look at the next batch.

Replicas average gradients in each step, so one that has no batch left would let the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.trainer import _compat

Gather = Callable[[Sequence[int]], list[list[int]]]

_UNKNOWN = -1
_END = object()


class SameLengthLoader:
    """A loader that ends on all ranks at once, or is refused on all of them.

    Args:
        loader: The user's; its attributes are this one's as well.
        gather: Returns the numbers of all ranks; a collective call.

    Raises:
        ConfigError: If ranks expect different numbers of batches.
    """

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
        if name == "loader":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            ConfigError: If some ranks have another batch, and others do not.
        """
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
        explain(
            expected="as many batches on all ranks",
            found=f"{found}, by rank",
            remedy="Give each replica as many, as Lightning's DistributedSampler does; a sampler "
            "or data set of your own takes strategy.distributed_sampler_kwargs.",
        )
    )


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class NextBatch:
    """The batches of a loop without gradients, and the one after the present."""

    def __init__(self) -> None:
        self._fetcher: Any = None
        self._source: _Source | None = None

    def attach(self, trainer: pl.Trainer) -> None:
        """Look ahead in the loop that `trainer` has begun.

        Where the user changes batches on their way to the device, or ranks must agree that there is
        another one, they are not looked at before.
        """
        self.detach()
        owners: list[tuple[Any, type]] = [(trainer.lightning_module, pl.LightningModule)]
        if trainer.datamodule is not None:  # type: ignore[attr-defined]
            owners.append((trainer.datamodule, pl.LightningDataModule))  # type: ignore[attr-defined]
        if any(is_overridden(hook, owner, kind) for owner, kind in owners for hook in _HOOKS):
            return
        fetcher = _compat.fetcher_of(trainer)
        loaders = [] if fetcher is None else fetcher.combined_loader.flattened
        if any(isinstance(one, SameLengthLoader) for one in loaders):  # ranks take batches together
            return
        self._fetcher = fetcher
        if self._fetcher is not None:
            self._source = self._fetcher.iterator = _Source(self._fetcher.iterator)

    def detach(self) -> None:
        """Look ahead no longer."""
        self._fetcher = self._source = None

    def peek(self, device: torch.device) -> Any:
        """Return the batch after the present one, on `device`; None if there is none."""
        if self._source is None:
            return None
        fetched = getattr(self._fetcher, "batches", None)  # by Lightning, of loaders without length
        item = fetched[0] if fetched else self._source.peek()
        return None if item is None else move_data_to_device(item[0], device)


class _Source(Iterator[Any]):
    """Hands items on; the next one can be looked at before. Errors come when their item would."""

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
        """Return the next item; None if there is none."""
        if not self._next:
            try:
                self._next = [(next(self._source), None)]
            except Exception as error:  # raised when its batch is asked for
                self._next = [(None, error)]
        return self._next[0][0]
