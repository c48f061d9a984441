"""The page on supported layers says what the tests run."""

from __future__ import annotations

from tests.helpers.support_table import PAGE, build_page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == build_page(), "run: python -m tests.helpers.support_table"
