"""How far is the peak memory that a plan predicts from the measured one?

python examples/benchmarks/memory/predicted.py
python examples/benchmarks/memory/predicted.py --models gcn --stages 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import print_table, train_once

GRAPH = {"nodes": 40_000, "edges": 800_000, "hidden": 64, "layers": 8}
SAVERS: dict[str, dict[str, Any]] = {
    "": {},
    "recompute": {"recompute": True},
    "bfloat16": {"histories": "bfloat16"},
    "recompute, bfloat16": {"recompute": True, "histories": "bfloat16"},
    "exact in chunks": {"exact_in_chunks": True},
    "all": {"recompute": True, "histories": "bfloat16", "exact_in_chunks": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", default=["gcn", "sage", "gat", "gcnii+norm"])
    add("--stages", nargs="+", type=int, default=[1, 2])
    add("--chunks", nargs="+", type=int, default=[1, 8])
    add("--savers", nargs="+", default=list(SAVERS), choices=SAVERS)
    add("--nodes", type=int, default=GRAPH["nodes"])
    add("--edges", type=int, default=GRAPH["edges"])
    options = parser.parse_args()
    rows = []
    sizes = itertools.product(options.models, options.stages, options.chunks, options.savers)
    for model, stages, chunks, name in sizes:
        if chunks == 1 and {"histories", "exact_in_chunks"} & SAVERS[name].keys():
            continue  # they have no effect
        cell = GRAPH | {"nodes": options.nodes, "edges": options.edges, "model": model}
        cell |= {"stages": stages, "chunks": chunks, **SAVERS[name]}
        plan = train_once(mode="plan", **cell)
        run = train_once(validate=True, warm=1, steps=3, memory_gib=1000, **cell)  # frees at once
        predicted, measured = plan["memory_mib"], max(run["anonymous_mib"])
        error = f"{predicted / measured - 1:+.0%}"
        row = [model, str(stages), str(chunks), name, f"{predicted:,.0f}", f"{measured:,.0f}"]
        rows.append([*row, error])
        print(json.dumps([*rows[-1], run["anonymous_mib"]]), file=sys.stderr)
    names = ["model", "ranks", "chunks", "saves", "predicted MiB", "measured MiB", "error"]
    print_table(names, rows)


if __name__ == "__main__":
    main()
