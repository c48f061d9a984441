"""The tables of supported layers and habits, made from the cases that the tests run.

Layers come from the cases of `convs`, each of which is trained in chunks beside an oracle.
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

With `num_chunks=1` every layer of one homogeneous graph is exact. With more chunks, the layers of
`torch_geometric.nn` are exact or refused, as listed here. Layers of your own (subclasses of
`MessagePassing`) are tried out on a small part of your graph before training, whole against chunks,
and refused where they differ.
"""
_NOTES = """
- Several edge sets over the same nodes work in one forward. `HeteroConv`, `HANConv` and `HGTConv`
  take one type of nodes; a network that `to_hetero` has written also takes several of one size.
- HANConv's mean over all nodes, which weighs its edge sets, is as stale as embeddings are.
- `SuperGATConv.get_attention_loss()`, over random pairs of all nodes, is refused in training.
- `MeshCNNConv` needs its edges in groups of four with one target, which is in row 1.
- `SplineConv` needs pyg-lib.
"""
_HABITS = """## Habits

What users write around layers. "Works" means: with one chunk training equals a plain Trainer's to
1e-9 in float64; in several chunks it trains, and validation is exact.
"""


def build_page() -> str:
    """Return the page as Markdown."""
    exact = sorted({case.name.partition(" ")[0] for case in CASES}, key=str.lower)
    lines = [_HEAD, f"## Exact: {len(exact)}\n", ", ".join(f"`{name}`" for name in exact) + "."]
    lines += [_NOTES, f"## Refused: {len(REFUSED)}\n", "| layer | why |", "| --- | --- |"]
    lines += [f"| `{name}` | {_reason(name)} |" for name in sorted(REFUSED, key=str.lower)]
    works, refused = [], []
    for habit, in_chunks in _habits():
        is_refused = in_chunks.startswith("refused")
        (refused if is_refused else works).append(f"| {habit} | {in_chunks} |")
    head = ["| what you write | in chunks |", "| --- | --- |"]
    return "\n".join([*lines, "", _HABITS, *head, *works, "", *head, *refused]) + "\n"


def _habits() -> Iterator[tuple[str, str]]:
    tests = ROOT / "tests"
    reach = sorted((tests / "reach").glob("test_*.py"))
    rest = [path for path in sorted(tests.rglob("test_*.py")) if path not in reach]
    for path in [*reach, *(one for one in rest if "\nHABITS = {" in one.read_text())]:
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for habit, (in_chunks, test, *cases) in import_module(name).HABITS.items():
            assert set(cases) <= set(_cases(test)), (test, cases)
            yield habit, in_chunks


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
