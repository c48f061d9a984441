"""Tables in docs/api say what docstrings and signatures say."""

from __future__ import annotations

import inspect
import re
import textwrap
from importlib import import_module
from typing import Any

import pytest

import lightning_gnnpipe
from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.callbacks.staleness import PipeCallback
from tests.docs.pages import PAGES

_ENOUGH = 60  # characters that say what an option does
_OPTION = re.compile(r"^(\w+): (.*?)(?=^\w+: |\Z)", re.MULTILINE | re.DOTALL)


def option_table() -> str:
    """Return one row an option: its name, its default, how its docstring begins."""
    doc = inspect.getdoc(GNNPipeStrategy) or ""
    args = textwrap.dedent(doc.split("Args:\n")[1].split("\n\n")[0])
    parameters = inspect.signature(GNNPipeStrategy).parameters
    rows = ["| option | default | what it is |", "| --- | --- | --- |"]
    for name, text in _OPTION.findall(args):
        if name == "accelerator":  # this and what follows are Lightning's
            break
        default, shown = parameters[name].default, ""
        for sentence in re.split(r"(?<=[^.]\.)\s", " ".join(text.split())):
            shown += f" {sentence}" if len(shown) < _ENOUGH else ""
        rows.append(f"| `{name}` | `{default!r}` |{shown} |")
    return "\n".join(rows)


def test_the_table_of_options_is_that_of_the_docstring() -> None:
    assert option_table() in PAGES["docs/api/index.md"].read_text(), option_table()


def write_call(kind: Any) -> str:
    """Return the call of `kind` with its defaults."""
    shown = []
    for one in inspect.signature(kind).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(one.name if one.default is one.empty else f"{one.name}={one.default!r}")
    return f"{kind.__name__}({', '.join(shown)})".replace("'", '"')


def table_of(page: str) -> str:
    """Return a row for each name of the page: how it is called or read, and its first sentences."""
    rows = []
    for path in re.findall(r"^::: (\S+)", PAGES[page].read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".")
        one = getattr(import_module(module), name)
        doc = inspect.getdoc(one) or ""
        fields = re.findall(r"^    (\w+): ", doc.partition("Attributes:\n")[2], re.MULTILINE)
        called = write_call(one) if page.endswith("models.md") or not inspect.isclass(one) else name
        text = " ".join(doc.partition("\n\n")[0].split()).replace("|", "\\|")
        more = f" Attributes: {', '.join(f'`{field}`' for field in fields)}." if fields else ""
        rows.append(f"| `{called}` | {text}{more} |")
    return "\n".join(rows)


@pytest.mark.parametrize("page", ["errors", "figures", "models"])
def test_the_table_of_a_page_has_its_names(page: str) -> None:
    found = table_of(f"docs/api/{page}.md")
    assert found in PAGES[f"docs/api/{page}.md"].read_text(), found


def test_the_table_of_callbacks_has_all_and_their_defaults() -> None:
    """As a call is written: what has no default, then what has one."""
    names = [getattr(lightning_gnnpipe, name) for name in lightning_gnnpipe.__all__]
    kinds = [one for one in names if inspect.isclass(one) and issubclass(one, PipeCallback)]
    expected = set(map(write_call, kinds))
    table = PAGES["docs/api/callbacks.md"].read_text()
    assert expected == set(re.findall(r"^\| `(\w+\(.*?\))` \|", table, re.MULTILINE))
