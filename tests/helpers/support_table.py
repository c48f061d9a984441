"""The tables of supported layers and habits, made from the cases that the tests run.

A test file with habits ends in `HABITS`: what a user writes, what becomes of it in chunks, the
test, and names of its cases, if not all of them show it. Each file of `tests/reach` has them.

Write the page with `python -m tests.helpers.support_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from lightning_gnnpipe.layers.support import REFUSED_CONVS
from tests.helpers.convs import CASES, REFUSED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"

_HEAD = """# Which layers and habits run on chunks

Every layer that `torch_geometric.nn.conv` exports, with more than one chunk; [habits](#habits) are
below. With `num_chunks=1` every layer of one homogeneous graph is exact. This page is written by
`python -m tests.helpers.support_table` from the cases in `tests/helpers/convs.py`; each of them is
trained in chunks in `tests/passing/test_convs.py`, and its outputs and gradients equal an
independent oracle to 1e-10 in float64. `SplineConv` needs pyg-lib, which pip does not bring; it was
shown with a stand-in for the two functions that it takes from there (`tests/helpers/splines.py`).

"Two sets" are two `edge_index` over the same nodes in one forward. `HeteroConv`, `HANConv` and
`HGTConv` are exact for one type of nodes and any number of edge sets over it; these three layers
are refused with several types. A network that `to_hetero` has written trains with one type, or with
several of the same size; it is refused if their sizes differ.
HANConv's mean over all nodes, which weighs its edge sets, is as stale as rows are: a chunk
sums what it and earlier chunks have just computed, and what later ones did a step ago.
`SuperGATConv` is exact in what it returns; its `get_attention_loss()`, over random pairs of all
nodes, is refused in training. `MeshCNNConv` needs its edges in groups of four with one target,
which is in row 1.
"""
_HABITS = """## Habits

What users write around layers. "As plainly" means: with one chunk training equals a plain Trainer's
to 1e-9 in float64; in several chunks it trains, and validation is exact. The last column names a
file of `tests` and its cases, or its test; the words are `HABITS` in that file.

| what you write | in chunks | test |
| --- | --- | --- |
"""


def build_page() -> str:
    """Return the page as Markdown."""
    exact: dict[str, list[str]] = {}
    for case in CASES:
        name, _, option = case.name.partition(" ")
        exact.setdefault(name, []).append(option or "defaults")
    lines = [_HEAD, f"## Exact: {len(exact)}\n", "| layer | shown with |", "| --- | --- |"]
    lines += [f"| `{name}` | {', '.join(exact[name])} |" for name in sorted(exact, key=str.lower)]
    lines += ["", f"## Refused: {len(REFUSED)}\n", "| layer | why |", "| --- | --- |"]
    lines += [f"| `{name}` | {_reason(name)} |" for name in sorted(REFUSED, key=str.lower)]
    lines += [
        "",
        "Layers of your own (subclasses of `MessagePassing`) are tried out on a small part of your",
        "graph before training, whole against chunks, and refused where they differ.",
        "",
        _HABITS + "\n".join(_habits()),
    ]
    return "\n".join(lines) + "\n"


def _habits() -> Iterator[str]:
    tests = ROOT / "tests"
    reach = sorted((tests / "reach").glob("test_*.py"))
    rest = [path for path in sorted(tests.rglob("test_*.py")) if path not in reach]
    for path in [*reach, *(one for one in rest if "\nHABITS = {" in one.read_text())]:
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for habit, (in_chunks, test, *cases) in import_module(name).HABITS.items():
            assert set(cases) <= set(_cases(test)), (test, cases)
            shown = "; ".join(cases) or test.__name__.removeprefix("test_").replace("_", " ")
            yield f"| {habit} | {in_chunks} | `{path.relative_to(tests)}`: {shown} |"


def _cases(test: Callable[..., None]) -> Iterator[str]:
    """Yield what a test is parametrized with, as text."""
    for mark in getattr(test, "pytestmark", ()):
        for case in mark.args[1] if mark.name == "parametrize" else ():
            values = getattr(case, "values", case)  # of a pytest.param
            for value in values if isinstance(values, tuple) else [values]:
                yield getattr(value, "__name__", str(value))


def _reason(name: str) -> str:
    if name == "MessagePassing":
        return "the base class itself; subclasses of yours are tried out"
    return next(reason for kind, reason in REFUSED_CONVS.items() if kind.__name__ == name)


if __name__ == "__main__":
    PAGE.write_text(build_page())
