"""Statistics of norms where several ranks hold the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_gnnpipe.history import MomentStore, RowMoments, mean_and_var, sums_by_chunk
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

    def __getitem__(self, key: CallKey) -> RowMoments:
        """Return the statistics of a call."""
        assert self._moments is not None
        return self._moments[key]

    def keep(
        self, key: CallKey, rows: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the statistics of the rows of all ranks; see `MomentStore`."""
        sums = self._sum(sums_by_chunk(rows, counts))
        if self._moments is not None:
            self._moments.put(key, None if counts is None else sums, sums.sum(0))
        total = sums.sum(0)
        return *mean_and_var(total, torch.zeros_like(total[0])), total[0]
