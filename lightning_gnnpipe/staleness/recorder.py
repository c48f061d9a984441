"""Staleness statistics of a step: which rows were read stale, how old, and how far they move."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields

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
        for name in (one.name for one in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class StalenessRecorder:
    """Collects the `Staleness` of each history while attached to a store."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Staleness] = {}
        self._squares: dict[Hashable, Tensor] = {}  # `drift_sq`, `norm_sq`, still on the device

    @property
    def by_key(self) -> dict[Hashable, Staleness]:
        """The statistics of each history; waits for the device."""
        for key, squares in self._squares.items():
            self._by_key[key].drift_sq, self._by_key[key].norm_sq = squares.tolist()
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
