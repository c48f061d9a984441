"""The table of supported layers, made from the cases that the tests run.

Write it with `python -m tests.helpers.support_table`.
"""

from __future__ import annotations

from pathlib import Path

from lightning_gnnpipe.layers.support import REFUSED_CONVS
from tests.helpers.convs import CASES, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

_HEAD = """# Which layers run on chunks

Every layer that `torch_geometric.nn.conv` exports, with more than one chunk. With `num_chunks=1`
every layer of one homogeneous graph is exact. This page is written by
`python -m tests.helpers.support_table` from the cases in `tests/helpers/convs.py`; each of them is
trained in chunks in `tests/passing/test_convs.py`, and its outputs and gradients equal an
independent oracle to 1e-10 in float64. `SplineConv` needs pyg-lib, which pip does not bring; it was
shown with a stand-in for the two functions that it takes from there (`tests/helpers/splines.py`).

"Two sets" are two `edge_index` over the same nodes in one forward. `HeteroConv`, `HANConv` and
`HGTConv` are exact for one type of nodes and any number of edge sets over it; several types are
refused. HANConv's mean over all nodes, which weighs its edge sets, is as stale as rows are: a chunk
sums what it and earlier chunks have just computed, and what later ones did a step ago.
`SuperGATConv` is exact in what it returns; its `get_attention_loss()`, over random pairs of all
nodes, is refused in training. `MeshCNNConv` needs its edges in groups of four with one target,
which is in row 1.
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
    ]
    return "\n".join(lines) + "\n"


def _reason(name: str) -> str:
    if name == "MessagePassing":
        return "the base class itself; subclasses of yours are tried out"
    return next(reason for kind, reason in REFUSED_CONVS.items() if kind.__name__ == name)


if __name__ == "__main__":
    PAGE.write_text(build_page())
