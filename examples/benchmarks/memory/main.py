"""How much memory does a process take at its peak, above imports and data, and how long is a step?

python examples/benchmarks/memory/main.py
python examples/benchmarks/memory/main.py --tolokers --root DIR --rounds 3
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
AGAIN = {"recompute": True}
EXACT = {"exact_in_chunks": True}
ROUNDED = {"histories": "bfloat16"}
FILES = {"table-folder": "tables"}
Settings = dict[str, dict[str, Any]]

# GCNII of 16 layers on the synthetic graph: what takes less memory.
SYNTHETIC: Settings = {
    "PyG full batch, edges sorted": {"mode": "sorted", "steps": 1},
    "PyG, activation checkpointing, edges sorted": {"mode": "checkpointed", "steps": 1},
    "1 stage, 1 chunk": {"chunks": 1},
    "1 stage, exact in 16 chunks": {"chunks": 16, **EXACT},
    "1 stage, exact in 64 chunks": {"chunks": 64, **EXACT},
    "1 stage, exact in 16 chunks, tables in files": {"chunks": 16, **EXACT, **FILES},
    "1 stage": {"chunks": 64},
    "1 stage, recompute": {"chunks": 64, **AGAIN},
    "1 stage, recompute, bfloat16 histories": {"chunks": 64, **AGAIN, **ROUNDED},
    "2 stages": {"stages": 2, "chunks": 64},
    "2 stages, recompute": {"stages": 2, "chunks": 64, **AGAIN},
    "2 stages, recompute, bfloat16 histories": {"stages": 2, "chunks": 64, **AGAIN, **ROUNDED},
}
# A small network on a dense graph: 1,038,000 edges between 11,758 nodes.
TOLOKERS: Settings = {
    "PyG full batch": {"mode": "plain"},
    "PyG full batch, edges sorted": {"mode": "sorted"},
    "PyG full batch, torch.sparse CSR": {"mode": "csr"},
    "1 stage, 1 chunk (exact)": {"chunks": 1},
    "1 stage, 8 chunks": {"chunks": 8},
    "2 stages, 8 chunks": {"chunks": 8, "stages": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tuned", action="store_true", help=f"set GLIBC_TUNABLES={TUNABLES}")
    parser.add_argument("--tolokers", action="store_true", help="a GCN of 4 layers on Tolokers")
    parser.add_argument("--root", default=os.environ.get("GNNPIPE_DATA"), help="its raw files")
    options = parser.parse_args()
    if options.tuned:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
    settings = SYNTHETIC
    if options.tolokers:
        net = {"dataset": "Tolokers", "model": "gcn", "layers": 4, "hidden": 64}
        root = {"root": options.root} if options.root else {}
        settings = {name: {**net, **root, **setting} for name, setting in TOLOKERS.items()}
    runs = interleave(settings, options.rounds)
    plain = next(iter(settings))

    def peak(name: str) -> float:
        return max(run["peak_mib"] - run["base_mib"] for run in runs[name])

    rows = []
    for name in settings:
        seconds = median_step_s(runs[name])
        rows.append(
            [
                name,
                f"{peak(name):,.0f}",
                f"{max(run['anonymous_mib'][0] for run in runs[name]):,.0f}",
                f"{peak(name) / peak(plain):.2f}",
                f"{seconds:.3f}",
                f"{median_step_s(runs[plain]) / seconds:.1f}",
            ]
        )
    columns = ["a process", "peak MiB", "anonymous", "over PyG", "seconds a step", "times faster"]
    print_table(columns, rows)


if __name__ == "__main__":
    main()
