"""Many runs, each a process of its own; finished ones are lines of a CSV file and not run again."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
    """One process; it prints a line of JSON for each row of the results, some columns absent."""

    name: str
    command: Sequence[str]


def read_rows(path: Path) -> list[dict[str, str]]:
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
