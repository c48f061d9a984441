"""Statistics of norms where several ranks hold the rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_gnnpipe.history.moments import Moments, MomentStore
from lightning_gnnpipe.passing import CallKey


class SharedMoments:
    """The statistics of norms over the rows of all ranks of the stage.

    Args:
        sum_over_shards: Returns the sum of a tensor over the ranks.
        moments: Where they are kept; None where nothing is remembered.
    """

    def __init__(
        self, sum_over_shards: Callable[[Tensor], Tensor], moments: MomentStore | None
    ) -> None:
        self._sum, self._moments = sum_over_shards, moments

    def put(self, key: CallKey, rows: Tensor) -> Moments:
        """Serve the moments of all rows, of which these are this rank's; return them."""
        found = self._merge(Moments.of(rows))
        if self._moments is not None:
            self._moments.load(key, found)
        return found

    def exchange(self, key: CallKey, chunk: int, rows: Tensor) -> tuple[Moments, Moments | None]:
        """Add those of a chunk; return the last step's and, once complete, this step's."""
        assert self._moments is not None
        served, gathered = self._moments.exchange(key, chunk, rows)
        if gathered is not None:
            gathered = self._merge(gathered)
            self._moments.complete(key, gathered)
        return served, gathered

    def _merge(self, own: Moments) -> Moments:
        """Return the moments of the rows of all ranks."""
        sums = self._sum(torch.cat([own.mean.new_tensor([own.count]), own.mean * own.count]))
        count, mean = sums[0], sums[1:] / sums[0].clamp(min=1)
        spread = self._sum(own.count * (own.var + (own.mean - mean).square()))
        return Moments(int(count), mean, spread / count.clamp(min=1))
