"""Tables in docs/api say what docstrings and signatures say: of options, and of callbacks."""

from __future__ import annotations

import inspect
import re
import textwrap

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


def test_the_table_of_callbacks_has_all_and_their_defaults() -> None:
    """As a call is written: what has no default, then what has one."""
    names = [getattr(lightning_gnnpipe, name) for name in lightning_gnnpipe.__all__]
    kinds = [one for one in names if inspect.isclass(one) and issubclass(one, PipeCallback)]
    expected = set()
    for kind in kinds:
        parameters = inspect.signature(kind).parameters.values()
        shown = [
            one.name if one.default is one.empty else f"{one.name}={one.default!r}"
            for one in parameters
        ]
        expected.add(f"{kind.__name__}({', '.join(shown)})".replace("'", '"'))
    table = PAGES["docs/api/callbacks.md"].read_text()
    assert expected == set(re.findall(r"^\| `(\w+\(.*?\))` \|", table, re.MULTILINE))
