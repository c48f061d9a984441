"""Does the default train every network as exact training does?

    python examples/benchmarks/safety/main.py --root DIR --jobs 2

Trains each cell of cells.yaml exactly and by the default, for three seeds, a process of one thread
for each cell and method, `--jobs` at once. Each run is a line of OUTPUT/results.csv as soon as it
has ended, and is not run again. Then writes OUTPUT/table.md; `--tables-only` does only that.
Methods beside those of run_cell.py: SAFETY_METHODS='{"name": {options of the strategy}}'.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

sys.path.append(str(Path(__file__).parent))
from panel import Cell, read_cells
from table import read_rows, write_table

FOLDER = Path(__file__).parent
NO_GRAPH = 3  # exit status of run_cell.py


class NoGraphError(Exception):
    """The data of a cell are not there."""


def main() -> None:
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "results.csv"
    failed: list[str] = []
    if not options.tables_only:
        failed = run_all(read_cells(options.cells), options, results)
    write_table(read_rows(results), read_cells(), options.output / "table.md")
    print(options.output / "table.md")
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def run_all(cells: Sequence[Cell], options: argparse.Namespace, results: Path) -> list[str]:
    """Run what is not finished, in the order of cells.yaml; return what failed."""
    done = {(row["cell"], row["method"], row["seed"]) for row in read_rows(results)}
    jobs = []
    for cell in cells:
        for method in options.methods.split(","):
            seeds = [s for s in options.seeds.split(",") if (cell.name, method, s) not in done]
            if seeds:
                jobs.append((cell.name, method, seeds))
    print(f"{len(done)} runs are finished, {len(jobs)} cells to run", file=sys.stderr)
    failed, lock = [], Lock()
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run_cell, *job, options, results, lock): job for job in jobs}
        for number, future in enumerate(as_completed(running), start=1):
            name = " ".join(running[future][:2])
            error = future.exception()
            if error is not None and not isinstance(error, NoGraphError):
                failed.append(name)
            state = "" if error is None else f" {error}"
            print(f"{number}/{len(jobs)} {name}{state}", file=sys.stderr, flush=True)
    return failed


def run_cell(
    cell: str,
    method: str,
    seeds: Sequence[str],
    options: argparse.Namespace,
    results: Path,
    lock: Any,
) -> None:
    """Run the seeds of one cell and method in a process of their own, and note each as it ends."""
    command = [*options.prefix.split(), sys.executable, str(FOLDER / "run_cell.py")]
    command += [f"--cell={cell}", f"--method={method}", f"--seeds={','.join(seeds)}"]
    command += [f"--root={options.root}"] if options.root else []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    with lock:
                        note(json.loads(line), results)
        errors.seek(0)
        told = errors.read()[-4000:]
    if process.returncode == NO_GRAPH:
        raise NoGraphError(f"skipped, its graph is not there: {told.strip().splitlines()[-1]}")
    if process.returncode:
        raise RuntimeError(f"failed: {told}")


def note(row: dict[str, Any], results: Path) -> None:
    """Append a finished run."""
    is_new = not results.exists()
    with results.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--output", type=Path, default=Path("outputs/safety"))
    add("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    add("--cells", default="*", help="names or patterns, joined by commas")
    add("--methods", default="exact,default,recipe", help="names, joined by commas")
    add("--seeds", default="0,1,2")
    add("--prefix", default="", help="put before each command, such as 'nice -n 19'")
    add("--tables-only", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
