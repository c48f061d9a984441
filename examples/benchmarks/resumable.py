"""Many runs, each a process of its own; finished ones are lines of a CSV file and not run again."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

NO_GRAPH = 3  # exit status of a run whose graph is not there


class NoGraphError(Exception):
    """The data of a run are not there."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process; it prints a line of JSON for each row of the results."""

    name: str
    command: Sequence[str]


Rows = list[dict[str, str]]


def add_options(parser: argparse.ArgumentParser, output: str) -> None:
    """Add what `carry_out` and `make_run` read; `output` is the default folder."""
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--output", type=Path, default=Path(output))
    add("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    add("--prefix", default="", help="put before each command, such as 'nice -n 19'")
    add("--tables-only", action="store_true", help="run nothing")


def make_run(options: argparse.Namespace, script: Path, **arguments: object) -> Run:
    """Return a run of `script`, named after the values of its arguments."""
    command = [*options.prefix.split(), sys.executable, str(script)]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    command += [f"--root={options.root}"] if options.root else []
    return Run(" ".join(map(str, arguments.values())), command)


def carry_out(
    options: argparse.Namespace,
    find_missing: Callable[[Rows], Sequence[Run]],
    write_table: Callable[[Rows, Path], None],
) -> None:
    """Make the runs that are missing from OUTPUT/results.csv, and write OUTPUT/table.md.

    Raises:
        SystemExit: If a run has failed; the rest is run all the same.
    """
    results, table = options.output / "results.csv", options.output / "table.md"
    failed: list[str] = []
    if not options.tables_only:
        rows = read_rows(results)
        runs = find_missing(rows)
        print(f"{len(rows)} rows are finished, {len(runs)} runs to make", file=sys.stderr)
        failed = run_all(runs, results, options.jobs)
    write_table(read_rows(results), table)
    print(table)
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def read_rows(path: Path) -> Rows:
    """Return the finished rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run_all(runs: Sequence[Run], results: Path, num_jobs: int) -> list[str]:
    """Make the runs in their order, `num_jobs` at once; return the names of those that failed."""
    results.parent.mkdir(parents=True, exist_ok=True)
    failed, lock = [], Lock()
    with ThreadPoolExecutor(num_jobs) as pool:
        running = {pool.submit(_make, run, results, lock): run for run in runs}
        for number, future in enumerate(as_completed(running), start=1):
            name, error = running[future].name, future.exception()
            if error is not None and not isinstance(error, NoGraphError):
                failed.append(name)
            state = "" if error is None else f" {error}"
            print(f"{number}/{len(runs)} {name}{state}", file=sys.stderr, flush=True)
    return failed


def _make(run: Run, results: Path, lock: Any) -> None:
    """Make one run, and note each of its rows as it is printed."""
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            run.command, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    with lock:
                        _note(json.loads(line), results)
        errors.seek(0)
        text = errors.read()[-4000:]
    if process.returncode == NO_GRAPH:
        raise NoGraphError(f"skipped, its graph is not there: {text.strip().splitlines()[-1]}")
    if process.returncode:
        raise RuntimeError(f"failed: {text}")


def _note(row: Mapping[str, Any], results: Path) -> None:
    is_new = not results.exists()
    with results.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)
