"""Seconds an epoch of each setting: a plain Trainer, one device with one chunk, two stages.

    python examples/benchmarks/published/time_epochs.py --root DIR

Runs them in turn, one thread a process, without validation, and writes OUTPUT/times.md: the median
over the epochs of all rounds after those without staleness. What runs on one device is timed with
two threads as well: two stages use two cores. Nothing else should run meanwhile.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch

sys.path += [str(folder) for folder in Path(__file__).parents[1:3]]
from quiet import silence_lightning
from run_setting import NUM_EXACT, train
from settings import Setting, read_settings

WAYS = {  # method, devices, and threads of each
    "plain": ("plain", 1, 1),
    "plain, two threads": ("plain", 1, 2),
    "one": ("exact", 1, 1),
    "one, two threads": ("exact", 1, 2),
    "stages": ("pipeline", 2, 1),
}
NUM_TIMED = 10  # epochs of a run, after the exact ones and one to warm up
TIMEOUT_S = 900


class Times(L.Callback):
    """When each step began."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--output", type=Path, default=Path("outputs/published"))
    add("--settings", default="*", help="names or patterns, joined by commas")
    add("--rounds", type=int, default=3)
    add("--way", choices=list(WAYS), help="time one run of one setting, and print it")
    options = parser.parse_args()
    settings = read_settings(options.settings)
    if options.way:
        time_once(settings[0], options.way, options.root)
        return
    lines = [
        "| setting | plain, s | two threads, s | one device, one chunk, s | two threads, s "
        "| two stages, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for setting in settings:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, seconds in found.items():
                seconds += start(setting, way, options.root)
        cells = " | ".join(f"{statistics.median(seconds):.3f}" for seconds in found.values())
        lines.append(f"| {setting.name} | {cells} |")
        print(lines[-1], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "times.md").write_text("\n".join(lines) + "\n")


def start(setting: Setting, way: str, root: str | None) -> Sequence[float]:
    """Return the seconds of each epoch of one run, in processes of its own."""
    command = [sys.executable, __file__, f"--settings={setting.name}", f"--way={way}"]
    command += [f"--root={root}"] if root else []
    env = os.environ | {"OMP_NUM_THREADS": str(WAYS[way][2])}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds


def time_once(setting: Setting, way: str, root: str | None) -> None:
    """Print the seconds of each epoch but the first ones; on the first rank."""
    method, num_stages, num_threads = WAYS[way]
    torch.set_num_threads(num_threads)
    silence_lightning()
    warnings.filterwarnings("ignore", module="lightning")
    times = Times()
    setting = replace(setting, epochs=NUM_EXACT + NUM_TIMED + 2)
    train(setting, method, 0, root, times, num_stages=num_stages, validates=False)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(json.dumps([b - a for a, b in pairwise(times.starts)][-NUM_TIMED:]), flush=True)


if __name__ == "__main__":
    main()
