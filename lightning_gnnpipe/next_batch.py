"""Looking one batch ahead in the loop that runs, so that stages need not wait for its step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gnnpipe import _compat
from lightning_gnnpipe.loaders import EvenLoader

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
        if any(isinstance(one, EvenLoader) for one in loaders):  # whose ranks take batches together
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
            except Exception as error:  # whatever it is, it is raised in its turn
                self._next = [(None, error)]
        return self._next[0][0]
