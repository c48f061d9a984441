"""How long is an epoch with each `staleness` method?

    python examples/benchmarks/staleness_cost/main.py

One thread a process. Steps alone, then epochs with their validation, the rows of which "drift"
takes for stale reads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, get_args

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, print_table

from lightning_gnnpipe.types import StalenessName

METHODS = get_args(StalenessName)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=1, help="each a process of one thread")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parser.parse_args()
    methods = ["constant", *(name for name in options.methods if name != "constant")]
    if options.steps < 2:
        parser.error("expected --steps of at least 2: an epoch is timed to the start of the next")
    rows = []
    for what, key, validate in (("a step", "step_s", False), ("an epoch", "epoch_s", True)):
        settings: dict[str, dict[str, Any]] = {
            name: {
                "staleness": name,
                "validate": validate,
                "layers": options.layers,
                "stages": options.stages,
                "steps": options.steps,
            }
            for name in methods
        }
        runs = interleave(settings, options.rounds)
        seconds = {
            name: statistics.median(one for run in runs[name] for one in run[key])
            for name in methods
        }
        for name in methods:
            rows.append(
                [what, name, f"{seconds[name]:.3f}", f"{seconds[name] / seconds['constant']:.3f}"]
            )
    print_table(["", "staleness", "seconds", 'to "constant"'], rows)


if __name__ == "__main__":
    main()
