"""What does cutting the graph into chunks cost, in one process?

    python examples/benchmarks/chunk_overhead/main.py --root DIR

A 16-layer GCNII of 128 channels; `--root` adds Coauthor Physics.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

CHUNKS = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", help="folder of raw data sets")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = []
    datasets = {"synthetic": {}, **({"Physics": {"root": options.root}} if options.root else {})}
    for dataset, more in datasets.items():
        settings = {f"K={k}": {"dataset": dataset, "chunks": k, **more} for k in CHUNKS}
        runs = interleave(settings, options.rounds)
        base = median_step_s(runs["K=1"])
        for name in settings:
            seconds = median_step_s(runs[name])
            rows.append([dataset, name, f"{seconds:.3f}", f"{seconds / base:.2f}"])
    print_table(["graph", "chunks", "seconds an epoch", "over K=1"], rows)


if __name__ == "__main__":
    main()
