"""Published accuracy: exact training and the pipeline beside what others report.

    python examples/benchmarks/published/main.py --root DIR --jobs 2

Trains each setting of settings.yaml exactly (one chunk) and in chunks, a process of one thread for
each seed, `--jobs` at once, and compares the first 20 epochs with those of a plain Trainer. Each
run is a line of OUTPUT/results.csv as soon as it has ended, and is not run again. Then writes
OUTPUT/table.md; `--tables-only` does only that.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from accuracies import write_table
from resumable import Rows, Run, add_options, carry_out, make_run
from settings import read_settings

SCRIPT = Path(__file__).parent / "run_setting.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_options(parser, "outputs/published")
    add = parser.add_argument
    add("--settings", default="*", help="names or patterns, joined by commas")
    add("--methods", default="compare,exact,pipeline", help="names, joined by commas")
    add("--accelerator", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    carry_out(options, partial(find_missing, options), partial(write_table, read_settings()))


def find_missing(options: argparse.Namespace, rows: Rows) -> list[Run]:
    """Return the runs of the settings that are not among `rows`."""
    done = {(row["setting"], row["method"], int(row["seed"])) for row in rows}
    return [
        make_run(
            options,
            SCRIPT,
            setting=setting.name,
            method=method,
            seed=seed,
            accelerator=options.accelerator,
        )
        for setting in read_settings(options.settings)
        for method in options.methods.split(",")
        for seed in range(1 if method == "compare" else setting.seeds)
        if (setting.name, method, seed) not in done
    ]


if __name__ == "__main__":
    main()
