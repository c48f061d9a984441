"""What does staleness cost in accuracy, by method, chunks and partition?

    python examples/benchmarks/convergence/main.py --root DIR --jobs 2

Runs the cells of a table (study.yaml), each in a process of one thread, `--jobs` at once. A
finished cell is a line of OUTPUT/cells.csv and a file of OUTPUT/curves/, and is not run again. Then
writes OUTPUT/tables.md and pictures of all finished cells (of those whose curves are there, where a
cells.csv came alone); `--tables-only` does only that.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parent))
from cell import METHODS, Cell
from pictures import draw
from tables import write_tables

FOLDER = Path(__file__).parent


def main() -> None:
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    finished = options.output / "cells.csv"
    if not options.tables_only:
        done = {row["name"] for row in read_rows(finished)}
        todo = [cell for cell in read_table(options.table) if cell.name not in done]
        print(f"{len(done)} cells are finished, {len(todo)} to run", file=sys.stderr)
        run_all(todo, options, finished)
    rows = list(read_rows(finished))
    write_tables(rows, options.output / "curves", options.output / "tables.md")
    draw(rows, options.output / "curves", options.output)


def read_table(path: Path) -> list[Cell]:
    """Return the cells of a table: the product of the lists of each block, no cell twice."""
    cells: dict[str, Cell] = {}
    for block in yaml.safe_load(path.read_text()):
        for values in product(*block.values()):
            cell = Cell(**dict(zip(block, values, strict=True)))
            if cell.method not in METHODS:
                raise ValueError(f"Expected a method among {', '.join(METHODS)} ({cell.method!r})")
            cells[cell.name] = cell
    return list(cells.values())


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the finished cells.

    Raises:
        ValueError: If they are of an earlier version of this program, with other options.
    """
    if path.exists():
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            found, expected = (rows.fieldnames or [])[1:], [field.name for field in fields(Cell)]
            if list(found[: len(expected)]) != expected:
                raise ValueError(f"Expected the columns {expected} in {path} ({found})")
            yield from rows


def run_all(cells: Sequence[Cell], options: argparse.Namespace, finished: Path) -> None:
    """Run the cells, so many at once, and note each as soon as it has finished."""
    (options.output / "curves").mkdir(exist_ok=True)
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run_cell, cell, options): cell for cell in cells}
        for number, future in enumerate(as_completed(running), start=1):
            cell = running[future]
            error = future.exception()
            if error is not None:
                failed.append(cell.name)
                print(f"{cell.name} failed: {error}", file=sys.stderr)
                continue
            note(cell, future.result(), finished, options.output / "curves")
            print(f"{number}/{len(cells)} {cell.name}", file=sys.stderr, flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} cells failed: {', '.join(failed)}")


def run_cell(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Run one cell in a process of its own; return what it measured."""
    command = [*options.prefix.split(), sys.executable, str(FOLDER / "cell.py")]
    command += [f"--{name}={value}" for name, value in asdict(cell).items()]
    command += [f"--root={options.root}"] if options.root else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def note(cell: Cell, found: dict[str, Any], finished: Path, curves: Path) -> None:
    """Write the curves, then the line that says that the cell is finished."""
    epochs = found.pop("curves")
    with (curves / f"{cell.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(epochs)
        writer.writerows(zip(*epochs.values(), strict=True))
    is_new = not finished.exists()
    with finished.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["name", *(field.name for field in fields(Cell)), *found])
        writer.writerow([cell.name, *asdict(cell).values(), *found.values()])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--table", type=Path, default=FOLDER / "study.yaml", help="which cells (YAML)")
    add("--output", type=Path, default=Path("outputs/convergence"))
    add("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    add("--prefix", default="", help="put before each command, such as 'nice -n 19'")
    add("--tables-only", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
