"""What the benchmarks share: the synthetic graph, runs in processes of their own, tables."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_NODES = 90_000
NUM_EDGES = 2_400_000  # directed; self-loops come on top where a layer adds them
NUM_BLOCKS = 64
INSIDE_FRAC = 0.6  # of the edges stay in a block
MATMUL = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision
WORKER = Path(__file__).parent / "train_once.py"
TIMEOUT_S = 1800


def make_edges(
    num_nodes: int = NUM_NODES,
    num_edges: int = NUM_EDGES,
    seed: int = 0,
    inside_frac: float = INSIDE_FRAC,
) -> Tensor:
    """Return `[2, num_edges]`: power-law degrees and planted blocks, nodes in random order."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(num_nodes, generator=generator).clamp(min=1e-6) ** (-1 / 1.8)
    ends = torch.multinomial(weight, 2 * num_edges, replacement=True, generator=generator)
    source, target = ends[:num_edges], ends[num_edges:]
    block = torch.randint(NUM_BLOCKS, (num_nodes,), generator=generator)
    members = block.argsort()
    size = torch.bincount(block, minlength=NUM_BLOCKS)
    first = size.cumsum(0) - size
    inside = torch.rand(num_edges, generator=generator) < inside_frac
    of = block[source[inside]]
    place = first[of] + (torch.rand(of.numel(), generator=generator) * size[of]).long()
    target[inside] = members[place]
    return torch.stack([source, target])


def train_once(
    num_threads: int = 1, at_once: int = 1, timeout_s: float = TIMEOUT_S, **options: Any
) -> dict[str, Any]:
    """Run `train_once.py` with `options` in a process of its own and return what it measured.

    Args:
        num_threads: Threads of each rank.
        at_once: How many such runs, which know nothing of each other, to make side by side; the
            first one's measurement is returned.
        timeout_s: After that they are killed.
        options: Of `train_once.py`.
    """
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(at_once)
    ]
    try:
        printed = [one.communicate(timeout=timeout_s) for one in running]
    finally:
        for one in running:
            one.kill()
    for one, (_, errors) in zip(running, printed, strict=True):
        if one.returncode:
            raise RuntimeError(f"{arguments} failed:\n{errors[-4000:]}")
    result: dict[str, Any] = json.loads(printed[0][0].strip().splitlines()[-1])
    return result


def interleave(
    settings: Mapping[str, Mapping[str, Any]], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Run all settings one after the other, `rounds` times, so that noise meets all of them."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    for number in range(rounds):
        for name, options in settings.items():
            results[name].append(train_once(**options))
            print(f"round {number + 1}/{rounds}: {name}", file=sys.stderr)
    return results


def median_step_s(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over the steps of all runs, in seconds."""
    return statistics.median(step for run in runs for step in run["step_s"])


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print("| " + " | ".join(header) + " |")
    print("|" + " --- |" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
