from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import StaleRead, stale_frac, stale_reads
from tests.schedule.text import orders


def run_epoch(order: list[int], counts: list[list[int]]) -> tuple[list[tuple[int, int]], int, int]:
    """Return the stale pairs, the stale rows and all halo rows, by pushing and pulling."""
    written: set[int] = set()
    stale, num_stale, num_rows = [], 0, 0
    for reader in order:
        written.add(reader)
        for source, count in enumerate(counts[reader]):
            num_rows += count
            if count and source not in written:
                stale.append((reader, source))
                num_stale += count
    return sorted(stale), num_stale, num_rows


@given(orders, st.data())
def test_stale_reads_are_those_of_an_epoch(order: list[int], data: st.DataObject) -> None:
    chunks = range(len(order))
    counts = [[0 if c == d else data.draw(st.integers(0, 3)) for d in chunks] for c in chunks]
    pairs, num_stale, num_rows = run_epoch(order, counts)
    sources = {c: {d for d in chunks if counts[c][d]} for c in chunks}
    assert list(stale_reads(order, sources)) == pairs
    assert stale_frac(order, counts) == (num_stale / num_rows if num_rows else 0.0)


def test_later_chunks_are_stale() -> None:
    # ring of chunks 0 - 1 - 2 - 3 - 0; 2 comes first and finds nothing written
    ring = {0: {1, 3}, 1: {0, 2}, 2: {1, 3}, 3: {2, 0}}
    assert stale_reads((2, 0, 1, 3), ring) == ((0, 1), (0, 3), (2, 1), (2, 3))
    assert stale_reads((2, 0, 1, 3), ring)[0] == StaleRead(reader=0, source=1)


def test_one_chunk_reads_nothing_stale() -> None:
    assert stale_reads((0,), {0: ()}) == ()
    assert stale_frac((0,), [[0]]) == 0.0


def test_chunks_without_a_halo_may_be_left_out() -> None:
    assert stale_reads((0, 1), {0: [1]}) == ((0, 1),)


@pytest.mark.parametrize("sources", [{0: {2}}, {2: {0}}])
def test_unknown_chunks_are_refused(sources: dict[int, set[int]]) -> None:
    with pytest.raises(ScheduleError, match=r"'sources' to name chunks 0 to 1 \(got chunk 2\)"):
        stale_reads((0, 1), sources)


@pytest.mark.parametrize("counts", [[[0, 1]], [[0], [1]], [[0, 1], [1]]])
def test_counts_of_another_shape_are_refused(counts: list[list[int]]) -> None:
    with pytest.raises(ScheduleError, match="'halo_counts' to be 2 rows of 2 counts"):
        stale_frac((0, 1), counts)


def test_an_order_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(ScheduleError, match="Expected 'order'"):
        stale_reads((0, 0), {})
    with pytest.raises(ScheduleError, match="Expected 'order'"):
        stale_frac((1, 2), [[0, 0], [0, 0]])
