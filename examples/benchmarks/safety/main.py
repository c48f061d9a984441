"""Does the default train every network as exact training does?

    python examples/benchmarks/safety/main.py --root DIR --jobs 2

Trains each cell of cells.yaml exactly and by the default, for three seeds, a process of one thread
for each cell and method, `--jobs` at once. Each run is a line of OUTPUT/results.csv as soon as it
has ended, and is not run again. Then writes OUTPUT/table.md; `--tables-only` does only that.
Methods beside those of run_cell.py: SAFETY_METHODS='{"name": {options of the strategy}}'.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from panel import Cell, read_cells
from resumable import Run, read_rows, run_all
from table import write_table

FOLDER = Path(__file__).parent


def main() -> None:
    options = parse_options()
    results = options.output / "results.csv"
    failed: list[str] = []
    if not options.tables_only:
        runs = find_missing(read_cells(options.cells), options, results)
        failed = run_all(runs, results, options.jobs)
    write_table(read_rows(results), read_cells(), options.output / "table.md")
    print(options.output / "table.md")
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def find_missing(cells: Sequence[Cell], options: argparse.Namespace, results: Path) -> list[Run]:
    """Return a run for each cell and method of which some seeds are not finished."""
    done = {(row["cell"], row["method"], row["seed"]) for row in read_rows(results)}
    runs = []
    for cell in cells:
        for method in options.methods.split(","):
            seeds = [s for s in options.seeds.split(",") if (cell.name, method, s) not in done]
            command = [*options.prefix.split(), sys.executable, str(FOLDER / "run_cell.py")]
            command += [f"--cell={cell.name}", f"--method={method}", f"--seeds={','.join(seeds)}"]
            command += [f"--root={options.root}"] if options.root else []
            if seeds:
                runs.append(Run(f"{cell.name} {method}", command))
    print(f"{len(done)} runs are finished, {len(runs)} cells to run", file=sys.stderr)
    return runs


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
