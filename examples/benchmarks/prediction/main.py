"""Does a step take what `gnnpipe plan` has predicted (without the optimizer, which a step has)?

python examples/benchmarks/prediction/main.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, median_step_s, print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = {}
    for stages, chunks in ((1, 16), (2, 16), (2, 32), (2, 64)):
        size = {"stages": stages, "chunks": chunks}
        settings[f"{stages} stages, K={chunks}, predicted"] = {"mode": "plan", **size}
        settings[f"{stages} stages, K={chunks}"] = {"mode": "pipe", **size}
    runs = interleave(settings, options.rounds)
    rows = []
    for name in settings:
        if name.endswith("predicted"):
            continue
        predicted, measured = median_step_s(runs[f"{name}, predicted"]), median_step_s(runs[name])
        difference = f"{100 * (predicted / measured - 1):+.0f} %"
        rows.append([name, f"{predicted:.3f}", f"{measured:.3f}", difference])
    print_table(["", "predicted s", "measured s", "difference"], rows)


if __name__ == "__main__":
    main()
