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
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        first = rows.sum(0)
        num_nodes = -1 if counts is None else sum(counts)
        share = self._sum(torch.cat([first, first.new_tensor([rows.size(0), num_nodes])]))
        counts = counts if share[-2] == share[-1] else None  # the same on all ranks
        center = share[:-2] / share[-2].clamp(min=1)
        sums = self._sum(sums_by_chunk(rows, counts, center))
        total = sums.sum(0)
        if self._moments is not None:
            self._moments.put(key, None if counts is None else sums, total, center)
        return *mean_and_var(total, center), total[0]
