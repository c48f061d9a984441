"""Pages of docs/api say what docstrings and signatures say."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import lightning_gnnpipe
from lightning_gnnpipe.callbacks.staleness import PipeCallback
from scripts.write_api import PAGES, fill


def test_pages_hold_the_docstrings_of_today() -> None:
    """Else run `python scripts/write_api.py`."""
    assert len(list(PAGES.glob("*.md"))) == 5
    for path in PAGES.glob("*.md"):
        assert path.read_text() == fill(path.read_text()), path.name


def test_the_table_of_modules_is_right() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (`.*) \|$", (PAGES / "figures.md").read_text(), re.MULTILINE)
    assert len(rows) == 4
    for module, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert getattr(import_module(module), name).__module__ == module


def write_call(kind: Any) -> str:
    """Return the call of `kind` with its defaults."""
    shown = []
    for one in inspect.signature(kind).parameters.values():
        shown.append(one.name if one.default is one.empty else f"{one.name}={one.default!r}")
    return f"{kind.__name__}({', '.join(shown)})".replace("'", '"')


def test_the_table_of_callbacks_has_all_and_their_defaults() -> None:
    """As a call is written: what has no default, then what has one."""
    names = [getattr(lightning_gnnpipe, name) for name in lightning_gnnpipe.__all__]
    kinds = [one for one in names if inspect.isclass(one) and issubclass(one, PipeCallback)]
    expected = set(map(write_call, kinds))
    table = (PAGES / "callbacks.md").read_text()
    assert expected == set(re.findall(r"^\| `(\w+\(.*?\))` \|", table, re.MULTILINE))
