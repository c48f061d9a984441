"""How stale the rows of a step were: their age, and how far they have moved.

    drift = sum over the rows of chunks that have run of (row now - row then)
            / (the number of these rows + FLOOR)

A stale row is taken to have moved by the drift, which is a constant to autograd, as the row is.
Most of what one optimizer step changes is alike in all rows, and the drift takes that away.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gnnpipe.types import ChunkView


@dataclass(slots=True)
class Staleness:
    """Sums over the reads of one history in one step.

    Attributes:
        rows: Halo rows that were read.
        stale_rows: Those of them that an earlier step had written.
        age_sum: Sum of the ages, in steps, of the stale rows.
        drift_sq: Squared Frobenius norm of fresh minus stale values over all rows that were
            rewritten.
        norm_sq: Squared Frobenius norm of the fresh values.
        stale_pairs: (reader, source) chunks of the stale reads, in the order read.
    """

    rows: int = 0
    stale_rows: int = 0
    age_sum: int = 0
    drift_sq: float = 0.0
    norm_sq: float = 0.0
    stale_pairs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """Relative drift |H_stale - H_fresh| / |H_fresh|; 0 where nothing was rewritten."""
        return float((self.drift_sq / self.norm_sq) ** 0.5) if self.norm_sq > 0 else 0.0

    def add(self, other: Staleness) -> None:
        """Add the sums of `other`."""
        self.rows += other.rows
        self.stale_rows += other.stale_rows
        self.age_sum += other.age_sum
        self.drift_sq += other.drift_sq
        self.norm_sq += other.norm_sq
        self.stale_pairs += other.stale_pairs


class StalenessRecorder:
    """Collects `Staleness` a history; attached to a store only while somebody watches."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, Staleness] = {}

    def record_reads(self, key: Hashable, chunk: ChunkView, ages: Sequence[int]) -> None:
        """Note that `chunk` read its halo; `ages`, in steps, are those of its `halo_chunks`."""
        entry = self.by_key.setdefault(key, Staleness())
        for source, count, age in zip(chunk.halo_chunks, chunk.halo_counts, ages, strict=True):
            entry.rows += count
            if age > 0:
                entry.stale_rows += count
                entry.age_sum += age * count
                entry.stale_pairs.append((chunk.index, source))

    def record_drift(self, key: Hashable, *, stale: Tensor, fresh: Tensor) -> None:
        """Compare rows of a chunk with those that replace them, `[num_nodes_of_chunk, *]`."""
        entry = self.by_key.setdefault(key, Staleness())
        with torch.no_grad():
            entry.drift_sq += float((fresh - stale).double().square().sum())
            entry.norm_sq += float(fresh.double().square().sum())


FLOOR = 32.0  # rows that are taken not to have moved: few rows tell little of the others


class MeanDrift:
    """The mean drift of the rows of one history within a step.

    Args:
        ends: Where the rows of each chunk end.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._sums: dict[int, Tensor] = {}  # of the rows of each chunk
        self.begin_step()

    def begin_step(self) -> None:
        """Forget how far rows have moved in the last step."""
        self._moved: Tensor | None = None  # sums of change, and the number of rows behind them
        self._seen: dict[int, Tensor] = {}  # the drift when each chunk ran

    def replace(self, rows: Tensor) -> None:
        """Take note that all rows, `[num_rows, *]`, are others now."""
        starts = [0, *self._ends[:-1]]
        bounds = enumerate(zip(starts, self._ends, strict=True))
        self._sums = {chunk: _sum(rows[start:end]) for chunk, (start, end) in bounds}

    def move(
        self, chunk: int, rows: Tensor, sum_over_shards: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Take note of the rows of a chunk that has run.

        Args:
            chunk: The chunk.
            rows: `[num_nodes_of_chunk, *]`.
            sum_over_shards: Returns the sum of a tensor over the ranks that hold rows of the chunk;
                None for the rows of this rank alone.
        """
        now, then = _sum(rows), self._sums[chunk]
        self._sums[chunk] = now
        change = (now - then).flatten()
        change = torch.cat([change, change.new_tensor([rows.size(0)])])
        if sum_over_shards is not None:
            change = sum_over_shards(change)
        self._moved = change if self._moved is None else self._moved + change
        self._seen[chunk] = (self._moved[:-1] / (self._moved[-1] + FLOOR)).view_as(now)

    def seen_by(self, chunk: int) -> Tensor:
        """Return the drift that the chunk has seen when it ran, `[*]`."""
        return self._seen[chunk]


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
