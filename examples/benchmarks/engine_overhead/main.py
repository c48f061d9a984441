"""How much of a step is neither kernels nor waiting?

    python examples/benchmarks/engine_overhead/main.py

The same model with as many layers and chunks is trained on a graph of 20 nodes a chunk and 16
channels: what a step takes there is Python's, Lightning's and torch's share of a step, none of it
the kernels' work. The trace tells how much time lies between the chunks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

CHUNKS = (16, 32, 64)
NUM_LAYERS = 16
NODES_PER_CHUNK = 20
EDGES_PER_NODE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for chunks in CHUNKS:
        nodes = NODES_PER_CHUNK * chunks
        empty = {"nodes": nodes, "edges": EDGES_PER_NODE * nodes, "hidden": 16, "steps": 20}
        settings = {"full": {"chunks": chunks}, "empty": {"chunks": chunks, **empty}}
        runs = interleave(settings, options.rounds)
        full, rest = median_step_s(runs["full"]), median_step_s(runs["empty"])
        rows.append(
            [
                f"K={chunks}",
                f"{full:.3f}",
                f"{rest:.3f}",
                f"{100 * rest / full:.1f} %",
                f"{rest / chunks / NUM_LAYERS * 1e6:.0f}",
                f"{100 * runs['full'][-1]['bubble_frac']:.1f} %",
            ]
        )
    print_table(
        [
            "chunks",
            "seconds a step",
            "without work",
            "share",
            "us a layer and chunk",
            "between actions, by the trace",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
