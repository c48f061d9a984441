"""How much memory does a process take at its peak, above imports and data?

python examples/benchmarks/memory/main.py
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

PLAIN = "PyG full batch, edges sorted"
TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tuned", action="store_true", help=f"set GLIBC_TUNABLES={TUNABLES}")
    options = parser.parse_args()
    if options.tuned:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
    again = {"recompute": True}
    rounded = {"histories": "bfloat16"}
    settings: dict[str, dict[str, Any]] = {
        PLAIN: {"mode": "sorted", "steps": 1},
        "1 stage": {"chunks": 64},
        "1 stage, recompute": {"chunks": 64, **again},
        "1 stage, recompute, bfloat16 histories": {"chunks": 64, **again, **rounded},
        "2 stages": {"stages": 2, "chunks": 64},
        "2 stages, recompute": {"stages": 2, "chunks": 64, **again},
        "2 stages, recompute, bfloat16 histories": {"stages": 2, "chunks": 64, **again, **rounded},
    }
    runs = interleave(settings, options.rounds)

    def peak(name: str) -> float:
        return max(run["peak_mib"] - run["base_mib"] for run in runs[name])

    rows = []
    for name in settings:
        seconds = median_step_s(runs[name])
        base = next((n for n in ("1 stage", "2 stages") if name.startswith(n)), name)
        rows.append(
            [
                name,
                f"{peak(name):,.0f}",
                f"{peak(name) / peak(PLAIN):.2f}",
                f"{seconds:.2f}",
                f"{seconds / median_step_s(runs[base]):.2f}",
            ]
        )
    print_table(
        ["a process, K=64", "peak MiB", "over PyG", "seconds a step", "over no recompute"], rows
    )


if __name__ == "__main__":
    main()
