"""The table of options in docs/api/index.md says what the docstring and the signature say."""

from __future__ import annotations

import inspect
import re
import textwrap

from lightning_gnnpipe import GNNPipeStrategy
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
