"""Which cases of a test run each time; the others are slow: `scripts/check.sh --slow` has all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(*parameters: Iterable[Any]) -> list[Any]:
    """Return the product of `parameters`, slow but for a selection that has each value."""
    values = [list(one) for one in parameters]
    numbers = [range(len(one)) for one in values]
    chosen = {tuple(turn % len(one) for one in values) for turn in range(max(map(len, values)))}
    return [
        (pytest.param if one in chosen else slow)(
            *(value[i] for value, i in zip(values, one, strict=True))
        )
        for one in product(*numbers)
    ]


def some(cases: Iterable[Any], *, every: int) -> list[Any]:
    """Return `cases`, slow but for the first, the one that comes `every` cases later, and so on."""
    rows = [one if isinstance(one, tuple) else (one,) for one in cases]
    return [(slow if turn % every else pytest.param)(*one) for turn, one in enumerate(rows)]


def slow(*case: Any) -> Any:
    """Return a slow case."""
    return pytest.param(*case, marks=pytest.mark.slow)


def name_of(value: Any) -> str | None:
    """Return the id of a value of a case, if it has a name of its own."""
    return getattr(value, "name", None)
