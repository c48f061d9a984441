from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import StaleRead, stale_reads
from tests.schedule.text import orders


def run_epoch(order: list[int], sources: dict[int, set[int]]) -> list[tuple[int, int]]:
    """Return the stale pairs, by pushing and pulling."""
    written: set[int] = set()
    stale = []
    for reader in order:
        written.add(reader)
        stale += [(reader, source) for source in sources[reader] if source not in written]
    return sorted(stale)


@given(orders, st.data())
def test_stale_reads_are_those_of_an_epoch(order: list[int], data: st.DataObject) -> None:
    chunks = range(len(order))
    sources = {c: {d for d in chunks if c != d and data.draw(st.booleans())} for c in chunks}
    assert list(stale_reads(order, sources)) == run_epoch(order, sources)


def test_later_chunks_are_stale() -> None:
    # ring of chunks 0 - 1 - 2 - 3 - 0; 2 comes first and finds nothing written
    ring = {0: {1, 3}, 1: {0, 2}, 2: {1, 3}, 3: {2, 0}}
    assert stale_reads((2, 0, 1, 3), ring) == ((0, 1), (0, 3), (2, 1), (2, 3))
    assert stale_reads((2, 0, 1, 3), ring)[0] == StaleRead(reader=0, source=1)


def test_one_chunk_reads_nothing_stale() -> None:
    assert stale_reads((0,), {0: ()}) == ()


def test_chunks_without_a_halo_may_be_left_out() -> None:
    assert stale_reads((0, 1), {0: [1]}) == ((0, 1),)


@pytest.mark.parametrize("sources", [{0: {2}}, {2: {0}}])
def test_unknown_chunks_are_refused(sources: dict[int, set[int]]) -> None:
    with pytest.raises(ScheduleError, match=r"'sources' to name chunks 0 to 1 \(got chunk 2\)"):
        stale_reads((0, 1), sources)


def test_an_order_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(ScheduleError, match="Expected 'order'"):
        stale_reads((0, 0), {})
