"""Which cases of a test run each time; the others are slow: `scripts/check.sh --slow` has all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def covering(*parameters: Iterable[Any], times: int = 2) -> list[Any]:
    """Return combinations in which each value of the longest parameter comes so many times.

    The values of the others go round beside it, each time with others. All but the first round are
    slow.
    """
    values = [list(one) for one in parameters]
    most, found = max(map(len, values)), dict[tuple[int, ...], Any]()
    for turn in range(times * most):
        where = tuple(
            (turn % most + turn // most * number) % len(one) for number, one in enumerate(values)
        )
        case = [one[i] for one, i in zip(values, where, strict=True)]
        found.setdefault(where, (pytest.param if turn < most else slow)(*case))
    return list(found.values())


def slow(*case: Any) -> Any:
    """Return a slow case."""
    return pytest.param(*case, marks=pytest.mark.slow)


def name_of(value: Any) -> str | None:
    """Return the id of a value of a case, if it has a name of its own."""
    return getattr(value, "name", None)
