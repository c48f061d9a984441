"""Does a step take what `gnnpipe plan` has predicted (without the optimizer, which a step has)?

python examples/benchmarks/prediction/main.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))
from common import NUM_EDGES, NUM_NODES, interleave, median_step_s, print_table, train_once

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
NUM_LINKS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16])
    parser.add_argument("--nodes", type=int, default=NUM_NODES)
    parser.add_argument("--edges", type=int, default=NUM_EDGES)
    options = parser.parse_args()
    links = [train_once(mode="link", stages=2) for _ in range(NUM_LINKS)]
    link = {name: median(one[name] for one in links) for name in links[0]}
    print("Links of {link_gbit:.2f} Gbit/s, {message_us:.0f} us a message".format(**link))
    settings = {}
    for stages, shards in LAYOUTS:
        for chunks in options.chunks:
            size = {"stages": stages, "graph_parallel": shards, "chunks": chunks}
            size |= {"nodes": options.nodes, "edges": options.edges}
            name = f"{stages} x {shards}, K={chunks}"
            settings[f"{name}, predicted"] = {"mode": "plan", **size, **link}
            settings[name] = {"mode": "pipe", **size}
    runs = interleave(settings, options.rounds)
    rows = []
    for name in settings:
        if name.endswith("predicted"):
            continue
        predicted, measured = median_step_s(runs[f"{name}, predicted"]), median_step_s(runs[name])
        difference = f"{100 * (predicted / measured - 1):+.0f} %"
        rows.append([name, f"{predicted:.3f}", f"{measured:.3f}", difference])
    print_table(["stages x shards", "predicted s", "measured s", "difference"], rows)


if __name__ == "__main__":
    main()
