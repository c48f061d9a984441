"""Loaders whose replicas must have as many batches each, though no sampler sees to it.

Replicas average gradients in each step, so one that has no batch left would let the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from lightning_gnnpipe.errors import ConfigError, explain

Gather = Callable[[Sequence[int]], list[list[int]]]

_UNKNOWN = -1
_END = object()


class EvenLoader:
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
