"""How much memory does a process take at its peak, above imports and data?

python examples/benchmarks/memory/main.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

PLAIN = "PyG full batch, edges sorted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    settings = {
        PLAIN: {"mode": "plain", "sorted": True, "steps": 2},
        "1 stage, K=32": {"chunks": 32},
        "1 stage, K=32, recompute": {"chunks": 32, "recompute": True},
        "2 stages, K=32": {"stages": 2, "chunks": 32},
        "2 stages, K=32, recompute": {"stages": 2, "chunks": 32, "recompute": True},
    }
    runs = interleave(settings, options.rounds)

    def peak(name: str) -> float:
        return max(run["peak_mib"] - run["base_mib"] for run in runs[name])

    rows = [
        [
            name,
            f"{peak(name):,.0f}",
            f"{peak(name) / peak(PLAIN):.2f}",
            f"{median_step_s(runs[name]):.2f}",
        ]
        for name in settings
    ]
    print_table(["a process", "peak MiB", "over PyG", "seconds an epoch"], rows)


if __name__ == "__main__":
    main()
