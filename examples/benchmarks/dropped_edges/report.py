"""The finished runs as tables and as a picture: mean and spread over the seeds."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from cells import DATASETS, METHODS, Cell
from common import print_table


def summarize(finished: dict[Cell, dict[str, float]]) -> list[dict[str, Any]]:
    """Return one row for each setting: means over the seeds, and differences to one chunk."""
    groups: dict[Cell, list[tuple[int, dict[str, float]]]] = {}
    for cell, measured in finished.items():
        setting = Cell(**{**asdict(cell), "seed": 0})
        groups.setdefault(setting, []).append((cell.seed, measured))
    rows = []
    for setting, runs in groups.items():
        whole = Cell(setting.dataset, "contiguous", 1, "one chunk", 1, setting.epochs, 0)
        exact = dict(groups.get(whole, []))
        row: dict[str, Any] = asdict(setting)
        del row["seed"]
        row |= {"cut": runs[0][1]["cut"], "seeds": len(runs)}
        for name in ("test", "late"):
            values = [measured[name] for _, measured in runs]
            pairs = [m[name] - exact[seed][name] for seed, m in runs if seed in exact]
            row[name] = statistics.mean(values)
            row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
            row[f"{name}_change"] = statistics.mean(pairs) if pairs else float("nan")
        rows.append(row)
    order = {name: number for number, name in enumerate(METHODS)}
    return sorted(
        rows,
        key=lambda row: (
            DATASETS.index(row["dataset"]),
            order.get(row["method"], len(order)),  # some of the runs are of one that is no more
            row["method"],
            row["warmup"],
            row["partition"],
            row["chunks"],
        ),
    )


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([shown(value) for value in row.values()] for row in rows)


def print_accuracies(rows: Sequence[dict[str, Any]], figure: str) -> None:
    """Print one line for each data set and number of chunks: mean, spread, change to one chunk."""
    whole = {row["dataset"]: row for row in rows if row["method"] == "one chunk"}
    cut = [row for row in rows if row["method"] != "one chunk"]
    columns = list(dict.fromkeys(map(label_of, cut)))
    lines = []
    for dataset, chunks in sorted(
        {(row["dataset"], row["chunks"]) for row in cut},
        key=lambda one: (DATASETS.index(one[0]), one[1]),
    ):
        here = {label_of(r): r for r in cut if (r["dataset"], r["chunks"]) == (dataset, chunks)}
        cells = ["" if name not in here else accuracy(here[name], figure) for name in columns]
        one = accuracy(whole[dataset], figure).split(" (")[0] if dataset in whole else ""
        lines.append([dataset, str(chunks), one, *cells])
    print_table(["", "K", "one chunk", *columns], lines)


def accuracy(row: dict[str, Any], figure: str) -> str:
    """Return mean, standard deviation, and the mean difference to one chunk."""
    mean, spread, change = (row[f"{figure}{end}"] for end in ("", "_std", "_change"))
    return f"{mean:.1f} ± {spread:.1f} ({change:+.1f})"


def label_of(row: dict[str, Any]) -> str:
    """Name a setting, whatever the data set and the chunks are."""
    warmup = f", warm-up {row['warmup']}" if row["warmup"] > 1 else ""
    return f"{row['method']}{warmup}: {row['partition']}"


def shown(value: Any) -> str:
    """Return a cell of the table."""
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over chunks: a panel a data set, a line a method and partition."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in DATASETS if any(row["dataset"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(names), figsize=(4.6 * len(names), 4.4), squeeze=False)
    methods = list(dict.fromkeys(r["method"] for r in rows if r["method"] != "one chunk"))
    colours = dict(zip(methods, cast(Any, plt.get_cmap("tab10")).colors, strict=False))
    for axis, name in zip(axes[0], names, strict=True):
        here = [row for row in rows if row["dataset"] == name]
        whole = [row for row in here if row["method"] == "one chunk"]
        labels = list(dict.fromkeys(label_of(row) for row in here if row not in whole))
        for number, label in enumerate(labels):
            own = [row for row in here if row not in whole and label_of(row) == label]
            points, is_metis = [*whole[:1], *own], own[0]["partition"] == "metis"
            axis.errorbar(
                [row["chunks"] + 0.03 * (number - len(labels) / 2) for row in points],
                [row["test"] for row in points],
                [row["test_std"] for row in points],
                label=label,
                color=colours[own[0]["method"]],
                linestyle="--" if is_metis else "-",
                marker="s" if is_metis else "o",
                markersize=4,
                capsize=3,
                linewidth=1.3,
            )
        axis.set_title(name, loc="left")
        axis.set_xlabel("chunks")
        axis.set_xticks(sorted({row["chunks"] for row in here}))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("test accuracy [%]")
    marks, names = axes[0][0].get_legend_handles_labels()
    figure.legend(marks, names, loc="outside upper center", ncols=4, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    plt.close(figure)
