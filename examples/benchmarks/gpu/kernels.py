"""How near are kernels of sparse products to the memory's limit, and do their bits repeat?

python examples/benchmarks/gpu/kernels.py --device cuda

The package's kernel beside torch's, on all rows of a graph and on one chunk of 32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.chunks import now
from lightning_gnnpipe.passing.sparse import SparseRows, multiply

sys.path.append(str(Path(__file__).parents[1]))
from common import INSIDE_FRAC, NUM_BLOCKS, print_table

DTYPES = ("float32", "bfloat16", "float16", "float64")
HEADER = ("dtype", "rows", "kernel", "ms", "GB/s", "share of a copy's", "bits repeat")
NUM_CHUNKS = 32
Run = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", default="cuda")
    add("--nodes", type=int, default=1_000_000)
    add("--edges", type=int, default=16_000_000)
    add("--channels", type=int, default=128)
    add("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = measure(device, options.nodes, options.edges, options.channels, options.rounds)
    print_table(HEADER, as_table(rows))


def draw_edges(
    num_nodes: int, num_edges: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Return `[2, num_edges]`: power-law degrees, consecutive blocks of nodes."""

    def draw(count: int) -> Tensor:
        return torch.rand(count, device=device, generator=generator, dtype=torch.float64)

    degrees = (draw(num_nodes).clamp(min=1e-6) ** (-1 / 1.8)).cumsum(0)
    source, target = (
        torch.searchsorted(degrees, draw(num_edges) * degrees[-1]).clamp(max=num_nodes - 1)
        for _ in range(2)
    )
    size = -(-num_nodes // NUM_BLOCKS)
    near = (source // size * size + (draw(num_edges) * size).long()).clamp(max=num_nodes - 1)
    return torch.stack([source, torch.where(draw(num_edges) < INSIDE_FRAC, near, target)])


def measure(
    device: torch.device, num_nodes: int, num_edges: int, channels: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each dtype, part and kernel; what a kernel cannot do has an "error"."""
    generator = torch.Generator(device).manual_seed(0)
    source, target = draw_edges(num_nodes, num_edges, device, generator)
    target, order = target.sort()
    source = source[order]
    starts = torch.searchsorted(target, torch.arange(num_nodes + 1, device=device))
    parts = {"all": num_nodes, f"one chunk of {NUM_CHUNKS}": -(-num_nodes // NUM_CHUNKS)}
    found = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        values = torch.rand(num_edges, device=device, generator=generator).to(dtype)
        table = torch.randn(num_nodes, channels, device=device, generator=generator).to(dtype)
        copied_s, _ = clocked(table.clone, rounds)
        copy_rate = 2 * table.nbytes / copied_s
        for part, num_rows in parts.items():
            last = int(starts[num_rows])
            rows = SparseRows(
                starts[: num_rows + 1].int(), source[:last].int().clone(), values[:last].clone()
            )
            num_bytes = (last + num_rows) * channels * table.element_size() + rows_bytes(rows)
            for kernel, run in kernels(rows, table, target[:last]).items():
                row: dict[str, Any] = {"dtype": name, "rows": part, "kernel": kernel}
                try:
                    seconds, repeats = clocked(run, rounds)
                    rate = num_bytes / seconds
                    row |= {"ms": seconds * 1e3, "gb_per_s": rate / 1e9, "repeats": repeats}
                    row["share_of_copy"] = rate / copy_rate
                except RuntimeError as error:  # out of memory, or a dtype that it does not know
                    row["error"] = str(error).splitlines()[0][:120]
                found.append(row)
    return found


def kernels(rows: SparseRows, table: Tensor, target: Tensor) -> dict[str, Run]:
    """Return all kernels by name: the package's, and torch's."""
    assert rows.values is not None
    values = rows.values.unsqueeze(1)
    starts, source = rows.offsets.long(), rows.indices.long()
    size = starts.numel() - 1, table.size(0)
    matrix = torch.sparse_csr_tensor(rows.offsets, rows.indices, rows.values, size)

    def embedding_bag() -> Tensor:
        result: Tensor = torch.embedding_bag(
            table, rows.indices, rows.offsets, False, 0, False, rows.values, True
        )[0]
        return result

    def index_add() -> Tensor:
        sums = table.new_zeros(size[0], table.size(1))
        return sums.index_add_(0, target, table[source] * values)

    def segment_reduce() -> Tensor:
        return torch.segment_reduce(table[source] * values, "sum", offsets=starts, axis=0)

    return {
        "the package's": lambda: multiply(rows, table),
        "embedding_bag": embedding_bag,
        "sparse_csr": lambda: matrix @ table,
        "index_add": index_add,
        "segment_reduce": segment_reduce,
    }


def rows_bytes(rows: SparseRows) -> int:
    """Return the bytes of the matrix itself."""
    assert rows.values is not None
    return rows.offsets.nbytes + rows.indices.nbytes + rows.values.nbytes


def clocked(run: Run, rounds: int) -> tuple[float, bool]:
    """Return the median seconds, and whether all runs gave the same bits."""
    first, times, repeats = run(), [], True
    for _ in range(rounds):
        start = now()
        result = run()
        times.append(now() - start)
        repeats = repeats and torch.equal(first, result)
    return statistics.median(times), repeats


def as_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of `HEADER`."""
    return [
        [one["dtype"], one["rows"], one["kernel"], one["error"], "", "", ""]
        if "error" in one
        else [
            one["dtype"],
            one["rows"],
            one["kernel"],
            f"{one['ms']:.3f}",
            f"{one['gb_per_s']:.0f}",
            f"{one['share_of_copy']:.2f}",
            "yes" if one["repeats"] else "no",
        ]
        for one in rows
    ]


if __name__ == "__main__":
    main()
