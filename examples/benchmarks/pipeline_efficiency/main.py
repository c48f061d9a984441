"""How much faster are two stages than one at the same number of chunks?

    python examples/benchmarks/pipeline_efficiency/main.py

Each process has one thread; one process with two threads stands beside them. Two processes share
the memory's bandwidth: two runs of one stage side by side, which know nothing of each other, show
how much that costs any two processes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

CHUNKS = (16, 64)
ONE = "1 stage, 1 thread"
TWO = "2 stages, 1 thread each"
THREADS = "1 stage, 2 threads"
BESIDE = "1 stage, 1 thread, another beside it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for chunks in CHUNKS:
        settings = {
            ONE: {"chunks": chunks},
            TWO: {"stages": 2, "chunks": chunks},
            THREADS: {"chunks": chunks, "num_threads": 2},
            BESIDE: {"chunks": chunks, "at_once": 2},
        }
        runs = interleave(settings, options.rounds)
        seconds = {name: median_step_s(runs[name]) for name in settings}
        for name in settings:
            idle = "" if name != TWO else f"{100 * runs[name][-1]['bubble_frac']:.1f} %"
            speed_up = f"{seconds[ONE] / seconds[name]:.2f}"
            rows.append([f"K={chunks}", name, f"{seconds[name]:.3f}", speed_up, idle])
        bound = 2 * chunks / (chunks + 1)
        shared = bound * seconds[ONE] / seconds[BESIDE]
        rows.append([f"K={chunks}", "bound 2 K / (K + 1)", "", f"{bound:.2f}", ""])
        rows.append([f"K={chunks}", "the same at shared bandwidth", "", f"{shared:.2f}", ""])
    print_table(["chunks", "processes", "seconds an epoch", "speed-up", "idle"], rows)


if __name__ == "__main__":
    main()
