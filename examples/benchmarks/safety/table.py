"""results.csv as a Markdown table: does each method train every cell as exact training does?

A cell is "ok" if the best and the final metric are, in the mean over seeds, at most a tolerance
worse than exactly: the standard error of the difference, or 1 % of the exact value where that is
more. Seeds are compared in pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from panel import Cell

Row = Mapping[str, str]

REL_TOLERANCE = 0.01
MAX_JUMP_RATIO = 2.0
JUMP_FLOOR = 0.05  # of the first loss; exact runs that jump less count as having jumped so far
HEADER = (
    "cell",
    "method",
    "seeds",
    "exact best",
    "best",
    "difference",
    "exact final",
    "final",
    "difference",
    "metric",
    "jump ratio",
    "jump",
    "largest loss: exact, method",
    "CPU s: exact, method",
)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The runs of one cell by one method, and the exact ones of the same seeds."""

    cell: Cell
    method: str
    runs: Sequence[Row]
    exact: Sequence[Row]

    def differences(self, name: str) -> list[float]:
        """Return run minus exact of one figure, a seed each."""
        pairs = zip(self.runs, self.exact, strict=True)
        return [float(run[name]) - float(exact[name]) for run, exact in pairs]

    def is_as_good(self, name: str) -> bool:
        """Whether a metric is as good as exactly, within the tolerance."""
        found = statistics.mean(self.differences(name))
        gain = -found if self.cell.lower_is_better else found
        relative = REL_TOLERANCE * abs(mean_of(self.exact, name))
        return gain >= -max(standard_error(self.differences(name)), relative)  # not if it is NaN

    @property
    def is_ok(self) -> bool:
        """Whether both metrics are as good as exactly."""
        return self.is_as_good("best") and self.is_as_good("final")

    @property
    def jump_ratio(self) -> float:
        """The largest jump of the training loss, by that of exact training."""
        floor = JUMP_FLOOR * max_of(self.exact, "first_loss")
        return max_of(self.runs, "largest_jump") / max(max_of(self.exact, "largest_jump"), floor)

    @property
    def jumps_no_more(self) -> bool:
        """Whether the training loss is about as steady as exactly."""
        return self.jump_ratio <= MAX_JUMP_RATIO


def write_table(cells: Sequence[Cell], rows: Sequence[Row], path: Path) -> None:
    """Write a summary and one line for each cell and method that has exact runs beside it."""
    pairs = match(rows, cells)
    methods = list(dict.fromkeys(one.method for one in pairs))
    lines = [summary(method, [one for one in pairs if one.method == method]) for method in methods]
    lines += ["", "| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(describe(one)) + " |" for one in pairs]
    path.write_text("\n".join(lines) + "\n")


def match(rows: Sequence[Row], cells: Sequence[Cell]) -> list[Pairs]:
    """Return the runs of each cell and method with exact ones of the same seeds, where both are."""

    def of_seeds(cell: str, method: str) -> dict[int, Row]:
        mine = [row for row in rows if (row["cell"], row["method"]) == (cell, method)]
        return {int(row["seed"]): row for row in mine}

    methods = [one for one in dict.fromkeys(row["method"] for row in rows) if one != "exact"]
    found = []
    for cell in cells:
        for method in methods:
            mine, exact = of_seeds(cell.name, method), of_seeds(cell.name, "exact")
            seeds = sorted(mine.keys() & exact.keys())
            if seeds:
                pairs = [mine[seed] for seed in seeds], [exact[seed] for seed in seeds]
                found.append(Pairs(cell, method, *pairs))
    return found


def summary(method: str, pairs: Sequence[Pairs]) -> str:
    """Return how many cells a method trains as exact training does, and which it does not."""
    missed = [one.cell.name for one in pairs if not one.is_ok]
    jumping = [one.cell.name for one in pairs if not one.jumps_no_more]
    seconds = sum(float(row["seconds"]) for one in pairs for row in [*one.runs, *one.exact])
    return (
        f"- **{method}**: {len(pairs) - len(missed)} of {len(pairs)} cells ok in the metric "
        f"(MISS: {', '.join(missed) or 'none'}); {len(pairs) - len(jumping)} in jumps of the loss "
        f"(MISS: {', '.join(jumping) or 'none'}); {seconds / 60:.0f} minutes of one core, exact "
        "runs included."
    )


def describe(pairs: Pairs) -> list[str]:
    """Return the columns of one line."""
    columns = [pairs.cell.name, pairs.method, str(len(pairs.runs))]
    for name in ("best", "final"):
        found = pairs.differences(name)
        columns += [
            spread(pairs.exact, name),
            spread(pairs.runs, name),
            f"{statistics.mean(found):+.4f} ± {standard_error(found):.4f}"
            + ("" if pairs.is_as_good(name) else " worse"),
        ]
    columns += [
        "ok" if pairs.is_ok else "**MISS**",
        f"{pairs.jump_ratio:.1f}",
        "ok" if pairs.jumps_no_more else "**MISS**",
        f"{max_of(pairs.exact, 'largest_loss'):.3g}, {max_of(pairs.runs, 'largest_loss'):.3g}",
        f"{mean_of(pairs.exact, 'seconds'):.1f}, {mean_of(pairs.runs, 'seconds'):.1f}",
    ]
    return columns


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 of one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def spread(rows: Sequence[Row], name: str) -> str:
    """Return mean and standard deviation of one figure; of one run the value."""
    values = [float(row[name]) for row in rows]
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Return the mean of one figure."""
    return statistics.mean(float(row[name]) for row in rows)


def max_of(rows: Sequence[Row], name: str) -> float:
    """Return the largest of one figure; infinite where a run has none."""
    values = [float(row[name]) for row in rows]
    return math.inf if any(math.isnan(value) for value in values) else max(values)
