"""results.csv as a Markdown table: published, exact and pipeline, and which are out of bounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from settings import Setting

Row = Mapping[str, str]

BOUND_PUBLISHED = 0.7  # points; 1.5 published standard deviations where that is more
BOUND_EXACT = 0.5  # points that the pipeline may be worse
HEADER = (
    "setting",
    "chunks",
    "seeds",
    "published",
    "exact",
    "pipeline",
    "exact - published",
    "pipeline - exact",
    "exact and plain Trainer, 20 epochs",
    "epochs: exact, pipeline",
    "CPU s a run: exact, pipeline",
    "device: exact, pipeline",
)


def write_table(settings: Sequence[Setting], rows: Sequence[Row], path: Path) -> None:
    """Write one line for each setting that has runs."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    for setting in settings:
        mine = [row for row in rows if row["setting"] == setting.name]
        if mine:
            lines.append("| " + " | ".join(describe(setting, mine)) + " |")
    path.write_text("\n".join(lines) + "\n")


def describe(setting: Setting, rows: Sequence[Row]) -> list[str]:
    """Return the columns of one line."""
    runs = {
        method: {row["seed"]: row for row in rows if row["method"] == method}
        for method in ("compare", "exact", "pipeline")
    }
    exact, pipeline = runs["exact"], runs["pipeline"]
    both = sorted(exact.keys() & pipeline.keys())
    published = f"{setting.published:g}"
    if setting.deviation:
        published += f" ± {setting.deviation:g}"
    from_published = ""
    if exact:
        difference = statistics.mean(tests(exact)) - setting.published
        is_in = abs(difference) <= max(BOUND_PUBLISHED, 1.5 * setting.deviation)
        from_published = f"{difference:+.1f}" + ("" if is_in else ", beyond the bound")
    from_exact = ""
    if both:
        gains = [float(pipeline[s]["test"]) - float(exact[s]["test"]) for s in both]
        is_in = statistics.mean(gains) >= -BOUND_EXACT
        from_exact = f"{spread(gains, '+')}" + ("" if is_in else ", beyond the bound")
    differences = [row["difference"] for row in runs["compare"].values()]
    return [
        setting.name,
        str(setting.chunks),
        f"{len(exact)}, {len(pipeline)}",
        published,
        spread(tests(exact)),
        spread(tests(pipeline)),
        from_published,
        from_exact,
        ", ".join(differences),
        ", ".join(median(runs[method], "epochs") for method in ("exact", "pipeline")),
        ", ".join(median(runs[method], "cpu_s") for method in ("exact", "pipeline")),
        ", ".join(devices(runs[method]) for method in ("exact", "pipeline")),
    ]


def tests(runs: Mapping[str, Row]) -> list[float]:
    """Return the test metric of each seed."""
    return [float(row["test"]) for row in runs.values()]


def median(runs: Mapping[str, Row], name: str) -> str:
    """Return the median of one figure over the seeds."""
    return f"{statistics.median(float(row[name]) for row in runs.values()):.0f}" if runs else "-"


def devices(runs: Mapping[str, Row]) -> str:
    """Return where the seeds were trained."""
    return " and ".join(sorted({row["device"] for row in runs.values()})) or "-"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Return mean ± standard deviation."""
    if not values:
        return "-"
    text = f"{statistics.mean(values):{sign}.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")
    return f"{text} ± {statistics.stdev(values):.1f}" if len(values) > 1 else text
