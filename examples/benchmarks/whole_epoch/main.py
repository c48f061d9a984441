"""How long is a training step, beside PyG's full batch in one process with as many threads?

python examples/benchmarks/whole_epoch/main.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table

PLAIN = "PyG full batch, edges sorted, 1 process, 2 threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    settings = {
        PLAIN: {"mode": "plain", "sorted": True, "num_threads": 2, "steps": 3},
        "2 stages, K=32, 1 thread each": {"stages": 2, "chunks": 32},
        "1 stage, K=32, 2 threads": {"stages": 1, "chunks": 32, "num_threads": 2},
    }
    runs = interleave(settings, options.rounds)
    base = median_step_s(runs[PLAIN])
    print_table(
        ["GCNII, 16 layers of 128 channels", "seconds an epoch", "times faster"],
        [
            [name, f"{median_step_s(runs[name]):.2f}", f"{base / median_step_s(runs[name]):.1f}"]
            for name in settings
        ],
    )


if __name__ == "__main__":
    main()
