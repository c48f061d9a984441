"""What staleness costs in numbers: who read whom stale, how old rows were, how far off."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
