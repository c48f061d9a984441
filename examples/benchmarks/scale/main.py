"""Pipeline, graph parallelism or both, on 8 to 512 devices? By closed forms, for papers100M's size.

python examples/benchmarks/scale/main.py              # the table and scale.png, from measured.json
python examples/benchmarks/scale/main.py --measure    # measured.json: costs of a layer, replicas
python examples/benchmarks/scale/main.py --check      # predicted and measured, 2 and 4 ranks
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import interleave, make_edges, median_step_s, print_table, train_once

from lightning_gnnpipe.graph import partition_nodes, split_chunks
from lightning_gnnpipe.graph.partition import remote_reads
from lightning_gnnpipe.planning import LayoutWork, Link, factorize, time_layout

FOLDER = Path(__file__).parent
MEASURED = FOLDER / "measured.json"

NUM_NODES, NUM_EDGES, NUM_CLASSES = 111_059_956, 1_615_685_872, 172  # ogbn-papers100M
CHANNELS = 128
ROW_BYTES = CHANNELS * 4
WEIGHT_BYTES = CHANNELS * CHANNELS * 4  # of a layer
NUM_CROSSING = 2  # rows that cross a cut: GCNII sends x and x_0
IMBALANCE = 1.05  # the heaviest chunk or shard, over the mean
CHUNKS_PER_STAGE = 4

NUM_DEVICES = (8, 16, 32, 64, 128, 256, 512)
NUM_LAYERS = (16, 32, 64)
LINKS_GBIT = (10, 100, 400)
SPEEDS = {"CPU core, measured": 1.0, "100 times as fast": 100.0}

SMALL = {"num_nodes": 60_000, "num_edges": 870_000}  # 14.5 edges a node, as in papers100M
CHECKED = {"nodes": 30_000, "edges": 800_000, "chunks": 16, "layers": 16}
LAYOUTS = ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4))


@dataclass(frozen=True)
class Costs:
    """Seconds of one layer: `per_node * num_nodes + per_edge * num_edges`, each way."""

    forward: tuple[float, float]
    backward: tuple[float, float]

    def of(self, way: tuple[float, float], speed: float) -> float:
        """Return the seconds of a layer over the whole graph."""
        return (way[0] * NUM_NODES + way[1] * NUM_EDGES) / speed


@dataclass(frozen=True)
class Setting:
    """One curve's fixed part."""

    num_layers: int
    link_gbit: float
    speed: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--link-gbit", type=float, default=10.0, help="of --check")
    parser.add_argument("--rounds", type=int, default=2, help="of --check")
    options = parser.parse_args()
    if options.measure:
        found = {"layer": measure_layer(), "replicas": measure_replicas()}
        MEASURED.write_text(json.dumps(found, indent=2) + "\n")
    elif options.check:
        check(options.link_gbit, options.rounds)
    else:
        tabulate()


def measure_layer() -> dict[str, list[float]]:
    """Return seconds a node and an edge of a GCNII layer, from two graphs with other degrees."""
    size = {"mode": "plan", "layers": 6, "chunks": 16, "nodes": 90_000}
    few, many = (train_once(**size, edges=edges) for edges in (600_000, 2_400_000))
    found = {}
    for way in ("forward_s", "backward_s"):
        cost = [median(one[way]) for one in (few, many)]
        # PyG's layer adds a loop to each node, here and there: it is in the cost of a node
        per_edge = (cost[1] - cost[0]) / 1_800_000
        found[way] = [(cost[0] - per_edge * 600_000) / 90_000, per_edge]
    return found


def measure_replicas() -> dict[str, dict[str, float]]:
    """Return alpha by the number of shards: of the whole graph, and of 16 chunks of it."""
    found = {}
    for scale in (1, 2):
        num_nodes = scale * SMALL["num_nodes"]
        edges = make_edges(num_nodes, scale * SMALL["num_edges"])
        for num_chunks in (1, 16) if scale == 1 else (1,):
            chunks = partition_nodes(edges, num_nodes, num_chunks=num_chunks, method="metis")
            found[f"{num_nodes} nodes, {num_chunks} chunks"] = {
                str(shards): remote_reads(edges, split_chunks(edges, chunks, shards))[0].numel()
                / num_nodes
                for shards in (2**i for i in range(1, 10 if scale == 1 else 8))
            }
            print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def step_s(
    setting: Setting, num_stages: int, num_shards: int, measured: Mapping[str, Any]
) -> float:
    """Return the seconds of a step, without what all layouts have: outputs to all ranks, loss."""
    costs = Costs(*(tuple(measured["layer"][way]) for way in ("forward_s", "backward_s")))
    num_chunks = CHUNKS_PER_STAGE * num_stages
    counts = [
        setting.num_layers * (stage + 1) // num_stages - setting.num_layers * stage // num_stages
        for stage in range(num_stages)
    ]
    kind = "1 chunks" if num_stages == 1 else "16 chunks"
    [replicas] = [
        table
        for name, table in measured["replicas"].items()
        if name == f"{SMALL['num_nodes']} nodes, {kind}"
    ]
    alpha = 0.0 if num_shards == 1 else replicas[str(num_shards)]
    part = IMBALANCE / num_chunks / num_shards
    rows = part * NUM_NODES
    cut = [2 * NUM_NODES * IMBALANCE / num_shards * NUM_CROSSING * ROW_BYTES] * (num_stages - 1)
    layer_s = costs.of(costs.forward, setting.speed) + costs.of(costs.backward, setting.speed)
    weight_bytes = setting.num_layers * WEIGHT_BYTES
    work = LayoutWork(
        num_chunks=num_chunks,
        compute_s=[count * layer_s * IMBALANCE / num_shards for count in counts],
        halo_bytes=[2 * alpha * rows * num_chunks * count * ROW_BYTES for count in counts],
        num_messages=[0] * num_stages,  # they are large: bytes alone count
        cut_bytes=cut,
        link=Link.of(setting.link_gbit, 0.0),
        weight_bytes=weight_bytes * (2 - 1 / num_shards - 1 / num_stages),
    )
    return time_layout(work)[0]


def curves(setting: Setting, measured: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Return seconds by the number of devices for each way; of the best also its layout."""
    found: dict[str, dict[int, Any]] = {"pipeline": {}, "graph parallel": {}, "best": {}}
    for num_devices in NUM_DEVICES:
        layouts = factorize(num_devices, most_stages=setting.num_layers)
        times = {(s, g): step_s(setting, s, g, measured) for s, g in layouts}
        if num_devices <= setting.num_layers:
            found["pipeline"][num_devices] = times[num_devices, 1]
        found["graph parallel"][num_devices] = times[1, num_devices]
        best = min(times, key=lambda pair: times[pair])
        found["best"][num_devices] = times[best], best
    return found


def tabulate() -> None:
    measured = json.loads(MEASURED.read_text())
    all_curves = {
        setting: curves(setting, measured)
        for speed in SPEEDS.values()
        for num_layers in NUM_LAYERS
        for link in LINKS_GBIT
        for setting in [Setting(num_layers, link, speed)]
    }
    rows = []
    for setting, found in all_curves.items():
        if setting.speed == 1.0 and setting.num_layers != 32:
            continue
        for devices in (64, 512):
            best_s, (stages, shards) = found["best"][devices]
            pipeline_s = found["pipeline"].get(devices)
            one_s = step_s(Setting(setting.num_layers, 1e9, setting.speed), 1, 1, measured)
            rows.append(
                [
                    f"{setting.speed:g}x",
                    str(setting.num_layers),
                    f"{setting.link_gbit:g}",
                    str(devices),
                    "" if pipeline_s is None else f"{pipeline_s:.2f}",
                    f"{found['graph parallel'][devices]:.2f}",
                    f"{best_s:.2f}",
                    f"{stages} x {shards}",
                    f"{one_s / devices / best_s:.0%}",
                ]
            )
    names = ("pipeline s", "graph parallel s", "best s", "stages x shards", "of ideal")
    print_table(["device", "layers", "Gbit/s", "devices", *names], rows)
    draw(all_curves, measured)
    for link in LINKS_GBIT:
        once_s = NUM_NODES * NUM_CLASSES * 4 / (link * 1e9 / 8)
        print(f"Outputs of all nodes to 64 ranks at {link} Gbit/s: {6 * once_s:.0f} s")


def draw(all_curves: Mapping[Setting, Any], measured: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"pipeline": "#0072b2", "graph parallel": "#d55e00", "best": "#009e73"}
    labels = {
        "pipeline": "pipeline (up to a layer a device)",
        "graph parallel": "graph parallel",
        "best": "best of stages x shards",
    }
    figure, axes = pyplot.subplots(
        len(SPEEDS), len(LINKS_GBIT), figsize=(11, 7), sharex=True, sharey="row", squeeze=False
    )
    for row, (device, speed) in zip(axes, SPEEDS.items(), strict=True):
        for axis, link in zip(row, LINKS_GBIT, strict=True):
            setting = Setting(32, link, speed)
            one_s = step_s(Setting(32, 1e9, speed), 1, 1, measured)
            ideal = [one_s / devices for devices in NUM_DEVICES]
            axis.plot(NUM_DEVICES, ideal, "--", color="0.6", label="one device, divided")
            for name, points in all_curves[setting].items():
                is_best = name == "best"
                seconds = [value[0] if is_best else value for value in points.values()]
                style = {"linewidth": 2.5, "marker": "o", "zorder": 1} if is_best else {}
                axis.plot(
                    list(points),
                    seconds,
                    color=colors[name],
                    label=labels[name],
                    **{"linewidth": 1.5, "marker": ".", "zorder": 2, **style},
                )
            for devices, (seconds, (stages, shards)) in all_curves[setting]["best"].items():
                axis.annotate(
                    f"{stages}x{shards}",
                    (devices, seconds),
                    (0, -13),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                    color=colors["best"],
                )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.margins(x=0.09, y=0.1)
            axis.set_xticks(NUM_DEVICES, [str(devices) for devices in NUM_DEVICES])
            axis.grid(alpha=0.3)
            axis.set_title(f"{link} Gbit/s, {device}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("devices")
    for row in axes:
        row[0].set_ylabel("seconds a step")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, frameon=False)
    figure.suptitle("32 layers of 128 channels, 111 M nodes, 1.6 B edges: by closed forms")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(FOLDER / "scale.png", dpi=110)


def check(link_gbit: float, rounds: int) -> None:
    """Print predicted and measured seconds of small layouts, and their ratios."""
    settings = {}
    for stages, shards in LAYOUTS:
        size = {**CHECKED, "stages": stages, "graph_parallel": shards}
        settings[f"{stages} x {shards}"] = {"mode": "pipe", **size}
    runs = interleave(settings, rounds)
    predicted = {}
    for num_devices in (2, 4):
        one = train_once(mode="plan", **CHECKED, stages=num_devices, link_gbit=link_gbit)
        predicted |= {f"{s} x {g}": (seconds, bytes_) for s, g, seconds, bytes_ in one["layouts"]}
    rows = []
    for stages, shards in LAYOUTS:
        name, first = f"{stages} x {shards}", f"{stages * shards} x 1"
        seconds, bytes_ = predicted[name]
        measured_s = median_step_s(runs[name])
        rows.append(
            [
                name,
                f"{seconds:.3f}",
                f"{measured_s:.3f}",
                f"{seconds / predicted[first][0]:.2f}",
                f"{measured_s / median_step_s(runs[first]):.2f}",
                f"{bytes_ / 2**20:.0f}",
                f"{sum(runs[name][0]['bytes_by_kind'].values()) / 2**20:.0f}",
            ]
        )
    header = ["stages x shards", "predicted s", "measured s", "predicted ratio", "measured ratio"]
    print_table([*header, "predicted MiB", "measured MiB"], rows)


if __name__ == "__main__":
    main()
