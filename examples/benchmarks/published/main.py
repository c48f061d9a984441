"""Published accuracy: exact training and the pipeline beside what others report.

    python examples/benchmarks/published/main.py --root DIR --jobs 2

Trains each setting of settings.yaml exactly (one chunk) and in chunks, a process of one thread for
each seed, `--jobs` at once, and compares the first 20 epochs with those of a plain Trainer. Each
run is a line of OUTPUT/results.csv as soon as it has ended, and is not run again. Then writes
OUTPUT/table.md; `--tables-only` does only that.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from accuracies import write_table
from resumable import Run, read_rows, run_all
from settings import Setting, read_settings

FOLDER = Path(__file__).parent


def main() -> None:
    options = parse_options()
    results = options.output / "results.csv"
    failed: list[str] = []
    if not options.tables_only:
        runs = find_missing(read_settings(options.settings), options, results)
        failed = run_all(runs, results, options.jobs)
    write_table(read_rows(results), read_settings(), options.output / "table.md")
    print(options.output / "table.md")
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def find_missing(
    settings: Sequence[Setting], options: argparse.Namespace, results: Path
) -> list[Run]:
    """Return the runs that are not finished."""
    done = {(row["setting"], row["method"], row["seed"]) for row in read_rows(results)}
    runs = []
    for setting in settings:
        for method in options.methods.split(","):
            for seed in range(1 if method == "compare" else setting.seeds):
                command = [*options.prefix.split(), sys.executable, str(FOLDER / "run_setting.py")]
                command += [f"--setting={setting.name}", f"--method={method}", f"--seed={seed}"]
                command += [f"--root={options.root}"] if options.root else []
                if (setting.name, method, str(seed)) not in done:
                    runs.append(Run(f"{setting.name} {method} {seed}", command))
    print(f"{len(done)} runs are finished, {len(runs)} to run", file=sys.stderr)
    return runs


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--root", default=os.environ.get("GNNPIPE_DATA"), help="folder of raw data sets")
    add("--output", type=Path, default=Path("outputs/published"))
    add("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    add("--settings", default="*", help="names or patterns, joined by commas")
    add("--methods", default="compare,exact,pipeline", help="names, joined by commas")
    add("--prefix", default="", help="put before each command, such as 'nice -n 19'")
    add("--tables-only", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
