"""Which chunks read stale rows of which chunks.

A halo row is fresh if its chunk comes earlier in the order, stale if later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.build import require_order


class StaleRead(NamedTuple):
    """Chunk `reader` reads rows of chunk `source` from an earlier epoch."""

    reader: int
    source: int


def stale_reads(
    order: Sequence[int], sources: Mapping[int, Collection[int]]
) -> tuple[StaleRead, ...]:
    """Return the pairs (reader, source) of chunks with stale reads, sorted.

    Args:
        order: Chunk order of the forward phase, a permutation of `range(num_chunks)`.
        sources: For each chunk, the other chunks that its halo rows belong to. A chunk without a
            halo may be left out.

    Raises:
        ScheduleError: If `order` is not a permutation, or `sources` names a chunk not in it.
    """
    place = _places(order)
    pairs = [(reader, source) for reader, held in sources.items() for source in held]
    unknown = sorted({chunk for pair in pairs for chunk in pair} - place.keys())
    if unknown:
        raise ScheduleError(
            explain(
                expected=f"'sources' to name chunks 0 to {len(order) - 1}",
                found=f"chunk {unknown[0]}",
                remedy="Take 'order' and 'sources' from the same chunk plan.",
            )
        )
    return tuple(sorted({StaleRead(*pair) for pair in pairs if place[pair[1]] > place[pair[0]]}))


def stale_frac(order: Sequence[int], halo_counts: Sequence[Sequence[int]]) -> float:
    """Return the share of halo rows that are read stale, from 0 to 1; 0 without halo rows.

    `halo_counts[i][j]` is the number of halo rows that chunk i reads from chunk j.
    """
    place = _places(order)
    if any(len(each) != len(order) for each in (halo_counts, *halo_counts)):
        raise ScheduleError(
            explain(
                expected=f"'halo_counts' to be {len(order)} rows of {len(order)} counts",
                found=f"{len(halo_counts)} rows of {sorted({len(row) for row in halo_counts})}",
                remedy="Take 'order' and 'halo_counts' from the same chunk plan.",
            )
        )
    num_rows = num_stale = 0
    for reader, row in enumerate(halo_counts):
        for source, count in enumerate(row):
            if source != reader:
                num_rows += count
                num_stale += count if place[source] > place[reader] else 0
    return num_stale / num_rows if num_rows else 0.0


def _places(order: Sequence[int]) -> dict[int, int]:
    require_order(order)
    return {chunk: place for place, chunk in enumerate(order)}
