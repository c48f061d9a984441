"""How long is a training step, beside PyG's full batch in one process with as many threads?

python examples/benchmarks/whole_epoch/main.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

CSR = "PyG full batch, torch.sparse CSR, 1 process"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sorted", action="store_true", help="PyG on sorted edges as well")
    options = parser.parse_args()
    settings: dict[str, dict[str, Any]] = {
        CSR: {"mode": "csr", "num_threads": 2},
        "2 stages, K=16, 1 thread each": {"stages": 2, "chunks": 16},
        "2 stages, K=32, 1 thread each": {"stages": 2, "chunks": 32},
        "1 stage, K=32": {"stages": 1, "chunks": 32, "num_threads": 2},
        "2 stages, K=16, histories in bfloat16": {
            "stages": 2,
            "chunks": 16,
            "histories": "bfloat16",
        },
        "2 stages, K=32, histories in bfloat16": {
            "stages": 2,
            "chunks": 32,
            "histories": "bfloat16",
        },
    }
    if options.sorted:
        settings["PyG full batch, edges sorted"] = {
            "mode": "sorted",
            "num_threads": 2,
            "steps": 1,
        }
    runs = interleave(settings, options.rounds)
    base = median_step_s(runs[CSR])
    print_table(
        ["GCNII, 16 layers of 128 channels, 2 threads in all", "seconds a step", "times faster"],
        [
            [name, f"{median_step_s(runs[name]):.2f}", f"{base / median_step_s(runs[name]):.1f}"]
            for name in settings
        ],
    )


if __name__ == "__main__":
    main()
