"""Which kernel of sparse products is the fastest, and how near is it to the memory's limit?

python examples/benchmarks/gpu/kernels.py --device cuda --write

writes the table that the package reads: by dtype, the fastest kernel whose bits repeat. Kernels
that the package does not have are measured for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.chunks import synchronize
from lightning_gnnpipe.passing.sparse import KERNEL_TABLE, KERNELS, SparseRows, multiply

sys.path.append(str(Path(__file__).parents[1]))
from common import print_table

DTYPES = ("float32", "bfloat16", "float16", "float64")
HEADER = ("dtype", "kernel", "ms", "GB/s", "share of a copy's", "bits repeat")
Run = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", default="cuda")
    add("--nodes", type=int, default=1_000_000)
    add("--edges", type=int, default=16_000_000)
    add("--channels", type=int, default=128)
    add("--rounds", type=int, default=10)
    add("--write", action="store_true", help="the table of the package")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = measure(device, options.nodes, options.edges, options.channels, options.rounds)
    print_table(HEADER, as_table(rows))
    if options.write:
        write_table(device.type, rows)


def measure(
    device: torch.device, num_nodes: int, num_edges: int, channels: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each dtype and kernel; what a kernel cannot do has an "error"."""
    generator = torch.Generator(device).manual_seed(0)
    target, _ = torch.randint(num_nodes, (num_edges,), device=device, generator=generator).sort()
    source = torch.randint(num_nodes, (num_edges,), device=device, generator=generator)
    starts = torch.searchsorted(target, torch.arange(num_nodes + 1, device=device))
    found = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        values = torch.rand(num_edges, device=device, generator=generator).to(dtype)
        table = torch.randn(num_nodes, channels, device=device, generator=generator).to(dtype)
        rows = SparseRows(starts.int(), source.int(), values)
        num_bytes = (num_edges + num_nodes) * channels * table.element_size() + rows_bytes(rows)
        copied_s, _ = clocked(table.clone, device, rounds)
        copy_rate = 2 * table.nbytes / copied_s
        for kernel, run in kernels(rows, table, source, target).items():
            row: dict[str, Any] = {"dtype": name, "kernel": kernel}
            try:
                seconds, repeats = clocked(run, device, rounds)
                rate = num_bytes / seconds
                row |= {"ms": seconds * 1e3, "gb_per_s": rate / 1e9, "repeats": repeats}
                row["share_of_copy"] = rate / copy_rate
            except RuntimeError as error:  # out of memory, or a dtype that it does not know
                row["error"] = str(error).splitlines()[0][:120]
            found.append(row)
    return found


def kernels(rows: SparseRows, table: Tensor, source: Tensor, target: Tensor) -> dict[str, Run]:
    """Return all kernels by name: the package's, and others'."""
    assert rows.values is not None
    values = rows.values.unsqueeze(1)
    starts = rows.offsets.long()

    def index_add() -> Tensor:
        return torch.zeros_like(table).index_add_(0, target, table[source] * values)

    def segment_reduce() -> Tensor:
        return torch.segment_reduce(table[source] * values, "sum", offsets=starts, axis=0)

    ours: dict[str, Run] = {name: partial(multiply, rows, table, name) for name in KERNELS}
    return {**ours, "index_add": index_add, "segment_reduce": segment_reduce}


def rows_bytes(rows: SparseRows) -> int:
    """Return the bytes of the matrix itself."""
    assert rows.values is not None
    return rows.offsets.nbytes + rows.indices.nbytes + rows.values.nbytes


def clocked(run: Run, device: torch.device, rounds: int) -> tuple[float, bool]:
    """Return the median seconds, and whether all runs gave the same bits."""
    first, times, repeats = run(), [], True
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        result = run()
        synchronize(device)
        times.append(time.perf_counter() - start)
        repeats = repeats and torch.equal(first, result)
    return statistics.median(times), repeats


def as_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of `HEADER`."""
    return [
        [one["dtype"], one["kernel"], one["error"], "", "", ""]
        if "error" in one
        else [
            one["dtype"],
            one["kernel"],
            f"{one['ms']:.2f}",
            f"{one['gb_per_s']:.0f}",
            f"{one['share_of_copy']:.2f}",
            "yes" if one["repeats"] else "no",
        ]
        for one in rows
    ]


def write_table(device: str, rows: list[dict[str, Any]], path: Path = KERNEL_TABLE) -> None:
    """Write, for each dtype, the fastest of the package's kernels whose bits repeat."""
    chosen = json.loads(path.read_text())
    for dtype in DTYPES:
        fit = [one for one in rows if one["dtype"] == dtype and one["kernel"] in KERNELS]
        fit = [one for one in fit if one.get("repeats")]
        if fit:
            best = min(fit, key=lambda one: one["ms"])["kernel"]
            chosen.setdefault(device, {})[dtype] = best
    path.write_text(json.dumps(chosen, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
