"""Staleness statistics of a step, and the mean drift that is added to stale rows.

    drift = sum over the rows of chunks that have run of (row now - row then)
            / (the number of these rows + FLOOR)

An optimizer step changes most rows alike. Autograd treats stale rows and the drift as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk


@dataclass(slots=True)
class Staleness:
    """Sums over the reads of one history in one step.

    Attributes:
        rows: Number of halo rows read.
        stale_rows: Number of halo rows read that were written in an earlier step.
        age_sum: Sum of the ages of the stale rows, in steps.
        drift_sq: Squared Frobenius norm of fresh minus stale values, over all overwritten rows.
        norm_sq: Squared Frobenius norm of the fresh values.
        stale_pairs: Chunks (reader, source) of the stale reads, in the order read.
    """

    rows: int = 0
    stale_rows: int = 0
    age_sum: int = 0
    drift_sq: float = 0.0
    norm_sq: float = 0.0
    stale_pairs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """Relative drift |H_stale - H_fresh| / |H_fresh|; 0 if no row was overwritten."""
        return float((self.drift_sq / self.norm_sq) ** 0.5) if self.norm_sq > 0 else 0.0

    def add(self, other: Staleness) -> None:
        self.rows += other.rows
        self.stale_rows += other.stale_rows
        self.age_sum += other.age_sum
        self.drift_sq += other.drift_sq
        self.norm_sq += other.norm_sq
        self.stale_pairs += other.stale_pairs


class StalenessRecorder:
    """Collects the `Staleness` of each history while attached to a store."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Staleness] = {}
        self._squares: dict[Hashable, Tensor] = {}  # `drift_sq`, `norm_sq`, still on the device

    @property
    def by_key(self) -> dict[Hashable, Staleness]:
        """The statistics of each history; waits for the device."""
        for key, squares in self._squares.items():
            one = self._by_key[key]
            one.drift_sq, one.norm_sq = squares.tolist()
        return self._by_key

    def record_reads(self, key: Hashable, chunk: Chunk, ages: Sequence[int]) -> None:
        """Record halo reads of `chunk`; `ages` of its `halo_chunks` are in steps."""
        entry = self._by_key.setdefault(key, Staleness())
        for source, count, age in zip(chunk.halo_chunks, chunk.halo_counts, ages, strict=True):
            entry.rows += count
            if age > 0:
                entry.stale_rows += count
                entry.age_sum += age * count
                entry.stale_pairs.append((chunk.index, source))

    def record_drift(self, key: Hashable, *, stale: Tensor, fresh: Tensor) -> None:
        """Compare the old and new rows of a chunk, `[num_nodes_of_chunk, *]`."""
        self._by_key.setdefault(key, Staleness())
        with torch.no_grad():
            both = torch.stack([one.double().square().sum() for one in (fresh - stale, fresh)])
            self._squares[key] = self._squares[key] + both if key in self._squares else both


FLOOR = 32.0  # unchanged rows assumed in the mean: few rows say little about all


class MeanDrift:
    """Mean drift of one history within a step; `ends` are the end positions of the chunks."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._sums: dict[int, Tensor] = {}  # sum of rows, by chunk
        self.begin_step()

    def begin_step(self) -> None:
        self._moved: Tensor | None = None  # summed change, then the number of rows
        self._seen: dict[int, Tensor] = {}  # drift when the chunk ran, by chunk

    def replace(self, rows: Tensor) -> None:
        """Start from new rows, `[num_rows, *]`, after all were overwritten."""
        starts = [0, *self._ends[:-1]]
        bounds = enumerate(zip(starts, self._ends, strict=True))
        self._sums = {chunk: _sum(rows[start:end]) for chunk, (start, end) in bounds}

    def move(
        self, chunk: int, rows: Tensor, sum_over_shards: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Add the change of a chunk that has run; `rows`: `[num_nodes_of_chunk, *]`.

        `sum_over_shards` sums over the ranks that hold rows of the chunk; None: this rank alone.
        """
        now = _sum(rows)
        then = self._sums[chunk].to(now.device)  # the first sums may be on the host
        self._sums[chunk] = now
        change = (now - then).flatten()
        change = torch.cat([change, change.new_full((1,), rows.size(0))])
        if sum_over_shards is not None:
            change = sum_over_shards(change)
        self._moved = change if self._moved is None else self._moved + change
        self._seen[chunk] = (self._moved[:-1] / (self._moved[-1] + FLOOR)).view_as(now)

    def seen_by(self, chunk: int) -> Tensor:
        """Return the drift up to and including this chunk, `[*]`."""
        return self._seen[chunk]


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
