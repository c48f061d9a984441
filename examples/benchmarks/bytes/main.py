"""How many bytes travel in a training step, pipeline beside graph parallelism, 8 ranks?

python examples/benchmarks/bytes/main.py --root FOLDER

Counts, no times: the ranks share whatever cores there are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import print_table, train_once

NUM_RANKS = 8
GIB = 2**30
# Hidden channels as in the paper; the input's width matters to the first map alone, which every
# rank of a graph-parallel run has: so few features are kept that eight copies fit into memory.
GRAPHS: dict[str, dict[str, Any]] = {
    "squirrel": {"hidden": 1000, "undirected": True, "features": 100},
    "physics": {"hidden": 100, "features": 100},
}
PIPE = {"stages": NUM_RANKS, "chunks": 4 * NUM_RANKS}
WAYS: dict[str, dict[str, Any]] = {
    "graph": {"graph_parallel": NUM_RANKS, "chunks": 1},
    "whole": {**PIPE, "repeat_encoder": False},
    "staged": {**PIPE, "repeat_encoder": False, "weights": "staged"},
    "whole bf16": {**PIPE, "repeat_encoder": False, "cut_codec": "bf16"},
    "staged bf16": {
        **PIPE,
        "repeat_encoder": False,
        "weights": "staged",
        "cut_codec": "bf16",
    },
    "whole repeat": {**PIPE, "repeat_encoder": True},
    "staged repeat": {**PIPE, "repeat_encoder": True, "weights": "staged"},
}
REPEATED = {"gcnii"}  # an encoder crosses the cuts of no other model
# GNNPipe (arXiv 2308.10087), the authors' own logs: GiB of graph parallelism, of the pipeline.
PAPER = {
    ("squirrel", "gcn"): (4.43, 0.27),
    ("squirrel", "sage"): (6.10, 0.27),
    ("squirrel", "gcnii"): (4.53, 0.54),
    ("squirrel", "resgcn+"): (6.20, 0.27),
    ("physics", "gcn"): (0.88, 0.18),
    ("physics", "sage"): (0.94, 0.18),
    ("physics", "gcnii"): (0.88, 0.36),
    ("physics", "resgcn+"): (0.89, 0.18),
}
HEADER = [
    "graph",
    "model",
    "graph parallel, GiB",
    "of them weights",
    *(text for way in WAYS if way != "graph" for text in (f"{way}, GiB", "ratio")),
    "paper: graph parallel, pipeline, GiB",
    "ratio",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"))
    add("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    add("--models", nargs="+", default=["gcn", "sage", "gcnii", "resgcn+"])
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    add("--layers", type=int, default=32)
    add("--features", type=int, help="keep so many of a data set's, 0 for all (default: 100)")
    add("--results", type=Path, default=Path("bytes.json"), help="added to, and reported")
    add("--only-report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    known: dict[str, dict[str, int]] = {}
    if options.results.exists():
        known = json.loads(options.results.read_text())
    if not options.only_report:
        measure_all(options, known)
    cells = sorted({tuple(key.split("/")[:2]) for key in known}, key=list(PAPER).index)
    print_table(HEADER, [row_of(graph, model, known) for graph, model in cells])


def measure_all(options: argparse.Namespace, known: dict[str, dict[str, int]]) -> None:
    for graph in options.graphs:
        for model in options.models:
            for way in options.ways:
                if way.endswith("repeat") and model not in REPEATED:
                    continue
                print(f"{graph}, {model}, {way}", file=sys.stderr)
                result = train_once(
                    dataset=graph,
                    root=options.root,
                    model=model,
                    layers=options.layers,
                    balance="uniform",
                    start_method="fork",  # eight copies of the graph would not fit into memory
                    warm=1,  # the first step sends everything as it is
                    steps=1,
                    **kept(GRAPHS[graph], options.features),
                    **WAYS[way],
                )
                known[f"{graph}/{model}/{way}"] = result["bytes_by_kind"]
                options.results.write_text(json.dumps(known))


def kept(settings: dict[str, Any], num_features: int | None) -> dict[str, Any]:
    """Return the settings of a graph with another number of features, all of them for 0."""
    if num_features is None:
        return settings
    others = {name: value for name, value in settings.items() if name != "features"}
    return {**others, "features": num_features} if num_features else others


def row_of(graph: str, model: str, known: dict[str, dict[str, int]]) -> list[str]:
    counts = {way: known.get(f"{graph}/{model}/{way}") for way in WAYS}
    whole = {way: None if count is None else payload(count) for way, count in counts.items()}
    base, paper = whole["graph"], PAPER[graph, model]
    row = [graph, model]
    row += [as_gib(base), as_gib(base and counts["graph"].get("weight_grad", 0))]
    for way in (way for way in WAYS if way != "graph"):
        row += [as_gib(whole[way]), f"{base / whole[way]:.1f}" if base and whole[way] else ""]
    return [*row, f"{paper[0]}, {paper[1]}", f"{paper[0] / paper[1]:.1f}"]


def payload(counts: dict[str, int]) -> int:
    return sum(count for kind, count in counts.items() if kind != "control")


def as_gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.3f}"


if __name__ == "__main__":
    main()
