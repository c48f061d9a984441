"""Histories of statistics: mean and variance of all rows that a norm saw in the last pass.

A chunk is normalised with the moments of the whole graph as they were an epoch ago, and adds those
of its own rows to the ones that the next epoch will read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of rows, a column at a time; merged in float64.

    Attributes:
        count: Rows.
        mean: `[channels]`.
        var: `[channels]` the biased variance.
    """

    count: int
    mean: Tensor
    var: Tensor

    @staticmethod
    def of(rows: Tensor) -> Moments:
        """Return the moments of `rows`, `[num_rows, channels]`."""
        if rows.size(0) == 0:
            zeros = torch.zeros(rows.size(1), dtype=torch.float64, device=rows.device)
            return Moments(0, zeros, zeros)
        rows = rows.detach()
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        return Moments(rows.size(0), mean.double(), var.double())

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows.

        Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing
        sample variances".
        """
        count = self.count + other.count
        if count == 0:
            return self
        share = other.count / count
        delta = other.mean - self.mean
        var = self.var * (1 - share) + other.var * share + delta**2 * share * (1 - share)
        return Moments(count, self.mean + delta * share, var)


@dataclass(slots=True)
class _Entry:
    served: Moments | None = None
    gathered: Moments | None = None
    chunks: set[int] = field(default_factory=set)


class MomentStore:
    """The moments that norms of one stage read, and those that they are gathering.

    Args:
        num_chunks: Chunks of the plan, K.
    """

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._entries: dict[Hashable, _Entry] = {}

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def begin_step(self) -> None:
        """Serve from now on what the last step has gathered, where all chunks took part."""
        for key, entry in self._entries.items():
            entry.served = self.latest(key)
            entry.gathered, entry.chunks = None, set()

    def latest(self, key: Hashable) -> Moments | None:
        """Return the moments that the next step would read."""
        entry = self._entries[key]
        return entry.gathered if len(entry.chunks) == self._num_chunks else entry.served

    def load(self, key: Hashable, moments: Moments) -> None:
        """Serve `moments` from now on."""
        self._entries[key] = _Entry(served=moments)

    def complete(self, key: Hashable, moments: Moments) -> None:
        """Have what this step has gathered be `moments`, those of several ranks."""
        self._entries[key].gathered = moments

    def put(self, key: Hashable, rows: Tensor) -> Moments:
        """Serve the moments of the whole graph's rows, `[num_rows, channels]`; return them."""
        moments = Moments.of(rows)
        self._entries[key] = _Entry(served=moments)
        return moments

    def exchange(self, key: Hashable, chunk: int, rows: Tensor) -> tuple[Moments, Moments | None]:
        """Add the moments of one chunk's rows, `[num_rows, channels]`.

        Returns:
            Those of the whole graph in the last step, and in this one once all chunks were here.
        """
        entry = self._entries[key]
        assert entry.served is not None, f"unwritten moments of {key}"
        if chunk in entry.chunks:  # computed again for backward
            return entry.served, None
        moments = Moments.of(rows)
        entry.gathered = moments if entry.gathered is None else entry.gathered.merged(moments)
        entry.chunks.add(chunk)
        is_complete = len(entry.chunks) == self._num_chunks
        return entry.served, entry.gathered if is_complete else None
