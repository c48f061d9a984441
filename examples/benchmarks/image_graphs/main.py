"""Mini-batches of image graphs in a pipeline: how much faster than one process of one thread?

    python examples/benchmarks/image_graphs/main.py --root FOLDER

The network and the configurations of a study of pipelines for image graphs, with smaller
mini-batches. What this machine cannot time, since it needs more cores, is computed from the costs
of one process, and marked so. Draws the losses of short runs in float64 on top of each other: Adam
makes full steps of gradients near zero, so that in float32 their rounding would show.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from common import TIMEOUT_S, print_table

WORKER = Path(__file__).parent / "run_once.py"
SEQUENTIAL = "sequential"
PAPER = {
    SEQUENTIAL: (37.44, 13.56),
    "2 stages, 5 micro-batches": (19.02, 7.25),
    "2 stages, 10 micro-batches": (25.69, 8.19),
    "4 stages, 5 micro-batches": (28.12, 10.63),
    "4 stages, 10 micro-batches": (29.36, 11.08),
    "2 x 2 stages, 5 micro-batches": (19.19, 7.34),
    "2 x 2 stages, 10 micro-batches": (25.70, 8.86),
}
"""Seconds a mini-batch of 1000 images, training and test; Raffi and Dazzi (2024)."""


def main() -> None:
    options = parse_options()
    settings: dict[str, dict[str, Any]] = {SEQUENTIAL: {}}
    for num in options.micro_batches:
        settings[f"1 stage, {num} micro-batches"] = {"micro_batches": num}
    for num in options.micro_batches:
        settings[f"2 stages, {num} micro-batches"] = {"micro_batches": num, "stages": 2}
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for name, setting in settings.items():
            for mode in ("train", "test"):
                found = run_once(mode, setting, options)
                runs.setdefault((name, mode), []).append(found)
                step_s = statistics.median(found["training_s"] or found["test_s"])
                print(
                    f"{number + 1}/{options.rounds}: {name}, {mode}: {step_s:.3f}", file=sys.stderr
                )
    seconds = {
        name: (
            median_of(runs[name, "train"], "training_s"),
            median_of(runs[name, "test"], "test_s"),
        )
        for name in settings
    }
    measured = set(seconds)
    for num in options.micro_batches:
        events = [
            event
            for run in runs[f"1 stage, {num} micro-batches", "train"]
            for event in run["events"]
        ]
        test_s = seconds[f"1 stage, {num} micro-batches"][1]
        seconds[f"4 stages, {num} micro-batches"] = estimate(4, num, events, test_s)
        seconds[f"2 x 2 stages, {num} micro-batches"] = estimate(2, num, events, test_s)
    print_table(
        ["configuration", "training s", "faster", "test s", "faster", "study: training", "test"],
        [row_of(name, seconds, name in measured) for name in seconds],
    )
    short = {"precision": "64-true", "batch_size": 10, "steps": 10}
    losses = {
        name: run_once("train", {**setting, **short}, options)["losses"]
        for name, setting in settings.items()
    }
    draw(losses, options.picture)
    print(f"largest difference between losses: {largest_difference(losses):.1e} of the loss")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--dataset", choices=["cifar10", "digits"], default="cifar10")
    add("--batch-size", type=int, default=20, help="images in a mini-batch (default: 20)")
    add("--micro-batches", type=int, nargs="+", default=[5, 10])
    add("--steps", type=int, default=8, help="mini-batches that are timed, of each run")
    add("--rounds", type=int, default=2)
    add("--picture", type=Path, default=Path("losses.png"))
    return parser.parse_args()


def run_once(mode: str, setting: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run one configuration in a process of its own and return what it measured."""
    given = {"mode": mode, "dataset": options.dataset, "root": options.root}
    given |= {"batch_size": options.batch_size, "steps": options.steps, **setting}
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    done = subprocess.run(
        [sys.executable, str(WORKER), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def median_of(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(step for run in runs for step in run[key])


def estimate(
    num_stages: int, num_micro_batches: int, events: Sequence[Any], test_s: float
) -> tuple[float, float]:
    """Return seconds of training and test, with a core a stage and messages that take no time.

    Args:
        num_stages: Stages, as long as each other.
        num_micro_batches: Micro-batches.
        events: Phases of the micro-batches on one stage with all layers, and their seconds.
        test_s: Seconds of a mini-batch of it without gradients.
    """
    slots = (num_micro_batches + num_stages - 1) / num_stages  # of a micro-batch on all layers
    phases = ("forward", "backward")
    train_s = sum(statistics.mean(s for phase, s in events if phase == one) for one in phases)
    return slots * train_s, slots * test_s / num_micro_batches


def row_of(name: str, seconds: dict[str, tuple[float, float]], is_measured: bool) -> list[str]:
    train_s, test_s = seconds[name]
    base_train_s, base_test_s = seconds[SEQUENTIAL]
    replicas = 2 if name.startswith("2 x") else 1
    study = [f"{value:.2f}" for value in PAPER.get(name, ())] or ["", ""]
    return [
        name if is_measured else f"{name} (computed)",
        f"{train_s:.3f}",
        f"{replicas * base_train_s / train_s:.2f}",
        f"{test_s:.3f}",
        f"{replicas * base_test_s / test_s:.2f}",
        *study,
    ]


def largest_difference(losses: dict[str, list[float]]) -> float:
    """Return the largest difference to the sequential run's, as a share of the latter."""
    base = losses[SEQUENTIAL]
    return max(
        abs(one - other) / abs(other)
        for run in losses.values()
        for one, other in zip(run, base, strict=True)
    )


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, values) in enumerate(losses.items()):
        axis.plot(range(1, len(values) + 1), values, label=name, lw=6 - number, alpha=0.7)
    axis.set_xlabel("training step")
    axis.set_ylabel("loss")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
