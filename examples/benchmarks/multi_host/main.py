"""How long is a step on several hosts, by network and by what the hosts send each other?

sudo python examples/benchmarks/multi_host/main.py

The hosts are network namespaces of this machine, with one rank and one thread each; their links let
so many Mbit/s through in each direction. Needs root, for namespaces and rate limits.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import INSIDE_FRAC, MATMUL, NUM_EDGES, NUM_NODES, print_table
from hosts import Hosts, HostsError, check_permission

WORKER = Path(__file__).parent / "rank.py"
# By default glibc gives tensors of more than 32 MB back after each use, and faults their pages in
# again: graph parallelism has such tensors, chunks of a pipeline are smaller. All get the same.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30)}
ONE = "alone"
BASE = "graph fp32"
MODES: dict[str, dict[str, Any]] = {
    ONE: {"chunks": 1},
    "alone K": {},
    BASE: {"graph_parallel": 2, "chunks": 1},
    "graph int1": {"graph_parallel": 2, "chunks": 1, "halo_codec": "int1"},
    "graph async": {"graph_parallel": 2, "chunks": 1, "async_halo": True},
    "graph async int1": {
        "graph_parallel": 2,
        "chunks": 1,
        "async_halo": True,
        "halo_codec": "int1",
    },
    "pipe fp32": {"stages": 2},
    "pipe bf16": {"stages": 2, "cut_codec": "bf16"},
    "pipe int8": {"stages": 2, "cut_codec": "int8"},
    "pipe bf16, histories too": {"stages": 2, "cut_codec": "bf16", "histories": "bfloat16"},
    "graph fp32, 4 hosts": {"graph_parallel": 4, "chunks": 1},
    "pipe fp32, 4 hosts": {"stages": 4},
    "hybrid fp32, 4 hosts": {"stages": 2, "graph_parallel": 2},
    "hybrid async int1, 4 hosts": {
        "stages": 2,
        "graph_parallel": 2,
        "async_halo": True,
        "halo_codec": "int1",
    },
}
TWO_HOSTS = [name for name in MODES if "4 hosts" not in name]
HEADER = ["layers", "Mbit/s", "mode", "s a step", "times faster", "waits", "MB a step", "of them"]
SETTINGS = ("model", "nodes", "edges", "inside", "channels", "chunks", "matmul", "default_malloc")
PAYLOAD = ("forward", "backward", "output", "halo", "halo_grad", "weight_grad")


def main() -> None:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up, as on Ctrl-C
    known: dict[str, Any] = {}
    if options.results.exists():
        known = json.loads(options.results.read_text())
    try:
        if not options.only_report:
            check_settings(options, known)
            check_permission()
            measure_all(options, known)
    except HostsError as error:
        sys.exit(f"No hosts on this machine: {error}")
    settings = known.pop("settings", None)
    rows = collect(known)
    print_table(HEADER, [row_of(row, rows) for row in rows])
    products = [result["matmul"] for result in known.values()]
    if products:
        speed = statistics.median(one["gflop_per_s"] for one in products)
        error = max(one["error"] for one in products)
        print(f"\n{settings}\nfloat32 products: {speed:.0f} GFLOP/s, error {error:.1e}")
        draw(rows, options.picture)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--layers", type=int, nargs="+", default=[16])
    add("--rates", nargs="+", default=["none", "10000", "1000", "100"], help="Mbit/s, or none")
    add("--modes", nargs="+", choices=list(MODES), default=TWO_HOSTS)
    add("--model", default="gcn")
    add("--nodes", type=int, default=NUM_NODES)
    add("--edges", type=int, default=NUM_EDGES)
    add("--inside", type=float, default=INSIDE_FRAC, help="share of edges inside a block")
    add("--channels", type=int, default=128)
    add("--chunks", type=int, default=16, help="K of pipelines")
    add("--matmul", choices=MATMUL, default="highest", help="torch.set_float32_matmul_precision")
    add("--rounds", type=int, default=1, help="of all modes; steps are added up")
    add("--steps", type=int, default=5, help="measured at each rate, after one that is not")
    add("--warm", type=int, default=3, help="steps before that, without a limit")
    add("--default-malloc", action="store_true", help="let glibc give large tensors back")
    add("--timeout", type=float, default=1200.0, help="seconds, of one mode with all rates")
    add("--results", type=Path, default=Path("multi_host.json"), help="added to, and reported")
    add("--picture", type=Path, default=Path("multi_host.png"))
    add("--only-report", action="store_true", help="measure nothing")
    return parser.parse_args()


def check_settings(options: argparse.Namespace, known: dict[str, Any]) -> None:
    """Refuse to add to what was measured with other settings."""
    settings = {name: getattr(options, name) for name in SETTINGS}
    if known.setdefault("settings", settings) != settings:
        sys.exit(
            f"{options.results} has figures of other settings.\n  found: {known['settings']}\n"
            f"  wanted: {settings}\n  Take another file by --results."
        )


def measure_all(options: argparse.Namespace, known: dict[str, Any]) -> None:
    """Measure mode after mode, as many rounds as wanted: noise that lasts meets all of them."""
    for _, layers in product(range(options.rounds), options.layers):
        for mode in options.modes:
            rates = ["none"] if mode.startswith(ONE) else options.rates
            steps = measure(mode, layers, rates, options)
            for rate, result in steps.items():
                key = f"{layers}/{rate}/{mode}"
                if key in known:
                    earlier = known[key]["steps"]
                    result["steps"] = [a + b for a, b in zip(earlier, result["steps"], strict=True)]
                known[key] = result
            options.results.write_text(json.dumps(known))
            print(f"{mode}, {layers} layers: {summary(steps)}", file=sys.stderr)


def measure(
    mode: str, layers: int, rates: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Return, by rate, the figures of all ranks."""
    settings = {"chunks": options.chunks, **MODES[mode]}
    num_hosts = settings.get("stages", 1) * settings.get("graph_parallel", 1)
    settings |= {"hosts": num_hosts, "layers": layers, "hidden": options.channels}
    for name in ("model", "nodes", "edges", "inside", "matmul", "steps", "warm"):
        settings[name] = getattr(options, name)
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    command = [sys.executable, str(WORKER), *arguments, "--rates", *rates]
    environment = {"OMP_NUM_THREADS": "1", **({} if options.default_malloc else KEEP_MEMORY)}
    with Hosts(num_hosts) as hosts:
        printed = hosts.run(command, environment, options.timeout)
    ranks = [json.loads(text.strip().splitlines()[-1]) for text in printed]
    return {
        rate: {
            "steps": [rank["steps"][number] for rank in ranks],
            "bytes_by_kind": ranks[0]["bytes_by_kind"],
            "bubble_frac": ranks[0]["bubble_frac"],
            "matmul": ranks[0]["matmul"],
        }
        for number, rate in enumerate(rates)
    }


def collect(known: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the medians of all that was measured, sorted by layers, rate and mode."""
    rows = []
    for key, result in known.items():
        layers, rate, mode = key.split("/")
        walls = [step[0] for step in result["steps"][0]]
        wall_s = statistics.median(walls)
        every = [step for rank in result["steps"] for step in rank]
        rows.append(
            {
                "layers": int(layers),
                "rate": rate,
                "mode": mode,
                "step_s": wall_s,
                "spread_s": (min(walls), max(walls)),
                "wait": 1 - sum(step[1] for step in every) / sum(step[0] for step in every),
                "kinds": {k: result["bytes_by_kind"].get(k, 0) for k in PAYLOAD},
                "wire": sum(statistics.mean(s[2] for s in rank) for rank in result["steps"]),
            }
        )
    modes = list(MODES)
    rows.sort(key=lambda r: (r["layers"], -mbit_of(r["rate"]), modes.index(r["mode"])))
    return rows


def mbit_of(rate: str) -> float:
    return float("inf") if rate == "none" else float(rate)


def summary(steps: dict[str, Any]) -> str:
    rows = {rate: [s[0] for s in one["steps"][0]] for rate, one in steps.items()}
    return ", ".join(f"{rate}: {statistics.median(row):.2f} s" for rate, row in rows.items())


def row_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    is_alone = row["mode"].startswith(ONE)
    base = None if is_alone else base_of(row, rows)
    kinds = [f"{kind} {n / 1e6:.1f}" for kind, n in row["kinds"].items() if n]
    return [
        str(row["layers"]),
        "-" if is_alone else row["rate"],
        row["mode"],
        f"{row['step_s']:.2f} ({row['spread_s'][0]:.2f} - {row['spread_s'][1]:.2f})",
        f"{base / row['step_s']:.2f}" if base else "",
        f"{100 * row['wait']:.0f} %",
        f"{sum(row['kinds'].values()) / 1e6:.1f}",
        ", ".join(kinds),
    ]


def base_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the step of exact graph parallelism at this depth and rate, on as many hosts."""
    name = BASE + (", 4 hosts" if "4 hosts" in row["mode"] else "")
    found = (
        one["step_s"]
        for one in rows
        if (one["layers"], one["rate"], one["mode"]) == (row["layers"], row["rate"], name)
    )
    return next(found, None)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw seconds a step: a panel for each depth, rate and number of hosts, a bar a mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    many = [row for row in rows if not row["mode"].startswith(ONE)]
    panels = list(dict.fromkeys(panel_of(row) for row in many))
    alone = {row["layers"]: row["step_s"] for row in rows if row["mode"] == ONE}
    colours = dict(zip(MODES, plt.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    num_rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(num_rows, 2, figsize=(12, 3.2 * num_rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        layers, rate, hosts = panel
        here = [row for row in many if panel_of(row) == panel]
        names = [row["mode"] for row in here]
        bars = axis.barh(
            names, [row["step_s"] for row in here], color=[colours[name] for name in names]
        )
        texts = axis.bar_label(
            bars, [f"{row['step_s']:.3g}" for row in here], padding=3, fontsize=8
        )
        title = f"{layers} layers, {hosts} hosts, {label_of(rate)}"
        if layers in alone:
            axis.axvline(alone[layers], color="black", linestyle="--", linewidth=1, zorder=0)
            title += f" (dashed: alone, {alone[layers]:.3g} s)"
        for text in texts:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("seconds a step")
        axis.margins(x=0.08)
        axis.spines[["top", "right"]].set_visible(False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)


def panel_of(row: dict[str, Any]) -> tuple[int, str, int]:
    return row["layers"], row["rate"], 4 if "4 hosts" in row["mode"] else 2


def label_of(rate: str) -> str:
    if rate == "none":
        return "no limit"
    return f"{float(rate) / 1000:g} Gbit/s" if float(rate) >= 1000 else f"{rate} Mbit/s"


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        sys.exit(str(error))
