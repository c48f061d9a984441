"""Does the default train every network as exact training does?

    python examples/benchmarks/safety/main.py --root DIR --jobs 2

Trains each cell of cells.yaml exactly and by the default, for three seeds, a process of one thread
for each cell and method, `--jobs` at once. Each run is a line of OUTPUT/results.csv as soon as it
has ended, and is not run again. Then writes OUTPUT/table.md; `--tables-only` does only that.
Methods beside those of run_cell.py: SAFETY_METHODS='{"name": {options of the strategy}}'.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from panel import read_cells
from resumable import Rows, Run, add_options, carry_out, make_run
from table import write_table

SCRIPT = Path(__file__).parent / "run_cell.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_options(parser, "outputs/safety")
    add = parser.add_argument
    add("--cells", default="*", help="names or patterns, joined by commas")
    add("--methods", default="exact,default,recipe", help="names, joined by commas")
    add("--seeds", default="0,1,2")
    options = parser.parse_args()
    carry_out(options, partial(find_missing, options), partial(write_table, read_cells()))


def find_missing(options: argparse.Namespace, rows: Rows) -> list[Run]:
    """Return a run for each cell and method of which some seeds are not among `rows`."""
    done = {(row["cell"], row["method"], row["seed"]) for row in rows}
    runs = []
    for cell in read_cells(options.cells):
        for method in options.methods.split(","):
            seeds = [s for s in options.seeds.split(",") if (cell.name, method, s) not in done]
            if seeds:
                given = {"cell": cell.name, "method": method, "seeds": ",".join(seeds)}
                runs.append(make_run(options, SCRIPT, **given))
    return runs


if __name__ == "__main__":
    main()
