"""What does a graph in a folder take, over its size? Seconds, and anonymous memory of a process.

python examples/benchmarks/memory/sizes.py --folder /a/large/disk
python examples/benchmarks/memory/sizes.py --folder /a/large/disk --nodes 10000000 --picture
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from common import print_table, train_once

WIDTH, NUM_CLASSES, BLOCK = 64, 16, 1000
NEAR_FRAC = 0.7  # of edges within a block of nodes
ROWS = 1 << 20  # made at once
PREPARE = (
    "import sys; from lightning_gnnpipe import prepare_graph; "
    "prepare_graph(sys.argv[1], sys.argv[2], num_chunks=int(sys.argv[3]), partition='contiguous')"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="for graphs and tables, about 2 KB a node")
    add("--nodes", nargs="+", type=int, default=[100_000, 1_000_000])
    add("--edges-a-node", type=int, default=10)
    add("--chunks", type=int, default=64)
    add("--memory-gib", type=float, default=8.0)
    add("--picture", action="store_true", help="draw sizes.png of all such runs in the folder")
    options = parser.parse_args()
    rows: list[list[str]] = []
    kept = options.folder / f"runs-{options.edges_a_node}-{options.chunks}.json"
    for num_nodes in options.nodes:
        arrays = options.folder / f"arrays-{num_nodes}-{options.edges_a_node}"
        graph = options.folder / f"graph-{num_nodes}-{options.edges_a_node}-{options.chunks}"
        if not (arrays.exists() or graph.exists()):
            make_arrays(arrays, num_nodes, options.edges_a_node)
        prepare_s = prepare(arrays, graph, options.chunks)
        run = train(graph, options.folder / "tables", options.memory_gib)
        rows.append([f"{num_nodes:,}", f"{num_nodes * options.edges_a_node:,}", prepare_s])
        rows[-1] += [f"{one:.1f}" for one in (run["step_s"][0], *run["epoch_s"][1:])]
        rows[-1].append(f"{max(run['anonymous_mib']) / 1024:.2f}")
        runs = json.loads(kept.read_text()) if kept.exists() else {}
        kept.write_text(json.dumps(runs | {str(num_nodes): run}))
    names = ["nodes", "edges", "prepare s", "first step s", "epochs s", "GiB"]
    print_table(names, rows)
    if options.picture:
        draw(json.loads(kept.read_text()))


def make_arrays(folder: Path, num_nodes: int, edges_a_node: int) -> None:
    """Write features, labels and symmetric edges; the folder is there once they are whole."""
    draw, half = np.random.default_rng(0), num_nodes * edges_a_node // 2
    whole, folder = folder, folder.with_name(f"{folder.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    edges = np.empty((2, 2 * half), np.int64)
    source = edges[0, :half] = draw.integers(0, num_nodes, half)
    near = source // BLOCK * BLOCK + draw.integers(0, BLOCK, half)
    far = draw.integers(0, num_nodes, half)
    is_near = (draw.random(half) < NEAR_FRAC) & (near < num_nodes)
    edges[1, :half] = np.where(is_near, near, far)
    edges[:, half:] = edges[::-1, :half]
    np.save(folder / "edge_index.npy", edges)
    np.save(folder / "y.npy", np.arange(num_nodes) // BLOCK % NUM_CLASSES)
    path, shape = folder / "x.npy", (num_nodes, WIDTH)
    rows = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    for start in range(0, num_nodes, ROWS):
        part = rows[start : start + ROWS]
        part[:] = draw.standard_normal(part.shape, np.float32)
    rows.flush()
    folder.rename(whole)


def prepare(arrays: Path, graph: Path, num_chunks: int) -> str:
    """Return the seconds of preparing the graph in a process of its own; "" if it is there."""
    if graph.exists():
        return ""
    start = time.perf_counter()
    given = [str(arrays), str(graph), str(num_chunks)]
    subprocess.run([sys.executable, "-c", PREPARE, *given], check=True)
    return f"{time.perf_counter() - start:.0f}"


def train(graph: Path, tables: Path, memory_gib: float) -> dict[str, Any]:
    """Train one exact epoch and two pipelined ones on two processes, each with a validation."""
    options: dict[str, Any] = {"model": "gcn", "layers": 8, "hidden": WIDTH}
    options |= {"recompute": True, "histories": "bfloat16", "exact_in_chunks": True}
    options |= {"graph": graph, "table_folder": tables, "memory_gib": memory_gib}
    options |= {"stages": 2, "chunks": "auto", "validate": True, "warm": 0, "steps": 3}
    return train_once(timeout_s=3600, **options)


def draw(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw memory and seconds over the number of nodes; dashed: in proportion to it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    nodes = sorted(map(int, runs))
    found, figure = [runs[str(one)] for one in nodes], pyplot.figure(figsize=(9, 3.5))
    shown = {
        "GiB of a process": [max(run["anonymous_mib"]) / 1024 for run in found],
        "seconds of a pipelined epoch": [run["epoch_s"][-1] for run in found],
    }
    for number, (name, values) in enumerate(shown.items(), 1):
        axis = figure.add_subplot(1, 2, number)
        axis.loglog(nodes, [values[0] * one / nodes[0] for one in nodes], "--", color="0.6")
        axis.loglog(nodes, values, marker="o", color="#0072b2")
        axis.set_xlabel("nodes")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("sizes.png"), dpi=110)


if __name__ == "__main__":
    main()
