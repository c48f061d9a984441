"""How much faster are two stages than one at the same number of chunks, and where does time go?

    python examples/benchmarks/pipeline_efficiency/main.py

Each process has one thread; one process with two threads stands beside them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

CHUNKS = (16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for chunks in CHUNKS:
        settings = {
            "1 process, 1 thread": {"stages": 1, "chunks": chunks, "profile": True},
            "2 processes, 1 thread each": {"stages": 2, "chunks": chunks},
            "1 process, 2 threads": {"stages": 1, "chunks": chunks, "num_threads": 2},
        }
        runs = interleave(settings, options.rounds)
        base = median_step_s(runs["1 process, 1 thread"])
        for name in settings:
            seconds = median_step_s(runs[name])
            last = runs[name][-1]
            kernels = "" if last["kernel_frac"] is None else f"{100 * last['kernel_frac']:.1f} %"
            bubble = f"{100 * last['bubble_frac']:.1f} %"
            rows.append(
                [f"K={chunks}", name, f"{seconds:.3f}", f"{base / seconds:.2f}", bubble, kernels]
            )
        rows.append(
            [f"K={chunks}", "bound 2 K / (K + 1)", "", f"{2 * chunks / (chunks + 1):.2f}", "", ""]
        )
    print_table(
        ["chunks", "processes", "seconds an epoch", "speed-up", "idle", "inside of kernels"], rows
    )


if __name__ == "__main__":
    main()
