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
        drift_sq_of_chunk: `drift_sq` by chunk. What an exact pass has rewritten, all rows at once,
            is in the sums over all rows only.
        norm_sq_of_chunk: `norm_sq` likewise.
        stale_pairs: (reader, source) chunks of the stale reads, in the order read.
    """

    rows: int = 0
    stale_rows: int = 0
    age_sum: int = 0
    drift_sq: float = 0.0
    norm_sq: float = 0.0
    drift_sq_of_chunk: dict[int, float] = field(default_factory=dict)
    norm_sq_of_chunk: dict[int, float] = field(default_factory=dict)
    stale_pairs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """Relative drift |H_stale - H_fresh| / |H_fresh|; 0 where nothing was rewritten."""
        return _relative(self.drift_sq, self.norm_sq)

    @property
    def drift_of_chunk(self) -> dict[int, float]:
        """Relative drift of the rows of each chunk, ascending by chunk; empty in an exact step."""
        norms = sorted(self.norm_sq_of_chunk.items())
        return {chunk: _relative(self.drift_sq_of_chunk[chunk], norm) for chunk, norm in norms}

    def add(self, other: Staleness) -> None:
        """Add the sums of `other`."""
        self.rows += other.rows
        self.stale_rows += other.stale_rows
        self.age_sum += other.age_sum
        self.drift_sq += other.drift_sq
        self.norm_sq += other.norm_sq
        for chunk, norm_sq in other.norm_sq_of_chunk.items():
            self._add_to_chunk(chunk, other.drift_sq_of_chunk[chunk], norm_sq)
        self.stale_pairs += other.stale_pairs

    def add_drift(self, chunk: int | None, drift_sq: float, norm_sq: float) -> None:
        """Add what the rows of `chunk` have drifted; None for all rows at once."""
        self.drift_sq += drift_sq
        self.norm_sq += norm_sq
        if chunk is not None:
            self._add_to_chunk(chunk, drift_sq, norm_sq)

    def _add_to_chunk(self, chunk: int, drift_sq: float, norm_sq: float) -> None:
        self.drift_sq_of_chunk[chunk] = self.drift_sq_of_chunk.get(chunk, 0.0) + drift_sq
        self.norm_sq_of_chunk[chunk] = self.norm_sq_of_chunk.get(chunk, 0.0) + norm_sq


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

    def record_drift(
        self, key: Hashable, chunk: ChunkView, *, stale: Tensor, fresh: Tensor
    ) -> None:
        """Compare the rows of `chunk` with those that replace them, `[num_nodes_of_chunk, *]`."""
        entry = self.by_key.setdefault(key, Staleness())
        with torch.no_grad():
            drift_sq = float((fresh - stale).double().square().sum())
            norm_sq = float(fresh.double().square().sum())
        entry.add_drift(None if chunk.is_whole else chunk.index, drift_sq, norm_sq)


def _relative(drift_sq: float, norm_sq: float) -> float:
    """Return |H_stale - H_fresh| / |H_fresh|; 0 where there is nothing to compare with."""
    return float((drift_sq / norm_sq) ** 0.5) if norm_sq > 0 else 0.0
