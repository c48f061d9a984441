"""The order of the chunks in a step, as numbers in tensors.

A step writes new numbers to tensors that stay in place. So a chunk runs the same operations on the
same memory in each step, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk

FLOOR = 32.0  # unchanged rows assumed in means of rows: few rows say little about all


class StepOrder:
    """Which chunks are stale for which.

    Attributes:
        number: Of the order; a new one has a new number.
    """

    def __init__(self, num_chunks: int) -> None:
        self.number, self._num_chunks = 0, num_chunks
        self._order: tuple[int, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._numbers: dict[Hashable, tuple[int, Tensor]] = {}  # by name, dtype and device
        self._owners: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the halo, which is kept
        self.set(range(num_chunks), [1] * num_chunks)

    def set(self, order: Sequence[int], sizes: Sequence[int]) -> None:
        """Begin a step in `order`; `sizes`: nodes of each chunk, of all shards."""
        if (*order,) == self._order and (*sizes,) == self._sizes:
            return
        self._order, self._sizes, self.number = (*order,), (*sizes,), self.number + 1
        chunks = torch.tensor(self._order, device="cpu")
        places = torch.empty_like(chunks)
        places[chunks] = torch.arange(self._num_chunks, device="cpu")
        self._places = places.tolist()
        self._stale = (places > places.unsqueeze(1)).double()  # `[reader, source]`
        num_run = torch.tensor(sizes, dtype=torch.float64, device="cpu")[chunks].cumsum(0)
        self._by_drift = self._stale / (FLOOR + num_run)[places].unsqueeze(1)

    def is_stale(self, reader: int, source: int) -> bool:
        """Whether `reader` runs before `source`."""
        return self._places[reader] < self._places[source]

    def by_drift(self, reader: int, like: Tensor) -> Tensor:
        """Return by source chunk the factor of the drift for stale rows, else 0, `[num_chunks]`.

        The drift is the change of all rows that have run; the factor makes it a mean.
        """
        return self._kept("drift", like, lambda: self._by_drift)[reader]

    def halo_by_drift(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return `by_drift` of each halo row, `[num_halo]`."""
        key = id(chunk.halo)
        if key not in self._owners:
            counts = torch.tensor(chunk.halo_counts, device="cpu")
            owners = torch.tensor(chunk.halo_chunks, device="cpu").repeat_interleave(counts)
            self._owners[key] = chunk.halo, without_waiting(owners, like.device)
        owners = self._owners[key][1]
        return self._kept(key, like, lambda: self.by_drift(chunk.index, like)[owners])

    def has_run(self, source: int, like: Tensor) -> Tensor:
        """Return by chunk 1 if it reads fresh rows of `source`, else 0, `[num_chunks]`."""
        return self._kept("fresh", like, lambda: 1 - self._stale.t())[source]

    def shares(self, counts: tuple[int, ...], like: Tensor) -> Tensor:
        """Return `share_of_rows` by chunk, `[num_chunks, 3]`, of `counts` rows each."""

        def compute() -> Tensor:
            num_run, found = 0, {}
            for chunk in self._order:
                num_run += counts[chunk]
                found[chunk] = share_of_rows(counts[chunk], num_run, sum(counts))
            rows = [found[chunk] for chunk in range(len(counts))]
            return torch.tensor(rows, dtype=torch.float64, device="cpu")

        return self._kept(counts, like, compute)

    def _kept(self, key: Hashable, like: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return numbers of this order, with dtype and device of `like`, always in one place."""
        key = key, like.dtype, like.device
        number, kept = self._numbers.get(key, (0, None))
        if kept is None or number != self.number:
            values = compute().to(like.dtype)
            kept = like.new_empty(values.shape) if kept is None else kept
            is_here = values.device == kept.device
            kept.copy_(values if is_here else without_waiting(values, kept.device))
            self._numbers[key] = self.number, kept
        return kept


def share_of_rows(count: int, num_run: int, num_rows: int) -> tuple[float, float, float]:
    """Return three factors for statistics over `num_run` of `num_rows` rows, `count` just added.

    The share of the new rows; how many rows of `FLOOR` a row that has run stands beside, none at
    the last chunk; and minus the share of one row.
    """
    num_run = max(num_run, 1)
    return count / num_run, FLOOR * (1 - num_run / max(num_rows, 1)) / num_run, -1 / num_run


def without_waiting(small: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`; from pinned memory the host need not wait."""
    return small.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else small
