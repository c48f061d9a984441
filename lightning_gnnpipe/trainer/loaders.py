"""Loaders with equally many batches on all replicas.

Replicas average gradients in each step, so a replica without a batch would block all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from lightning_gnnpipe.errors import ConfigError

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
