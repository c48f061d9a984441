"""The finished cells of the study as Markdown: mean and spread over the seeds of each setting."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]

# What a table has in common, and what its lines differ in.
TABLE = ("dataset", "model", "layers", "recipe", "epochs", "anneal")
LINE = ("partition", "chunks", "method", "order", "warmup", "clip", "adaptive")
HEADER = (
    "cut",
    *LINE[:3],
    "setting",
    "seeds",
    "test, %",
    "to exact",
    "last 20 epochs, %",
    "worst fall at the end",
    "epochs to target",
    "train loss",
    "ms an epoch",
)


NUM_SMOOTHED = 5  # epochs whose mean is to reach the target
MARGIN = 0.01  # by which the target is below what exact training ends with


def write_tables(rows: Sequence[Row], curves: Path, path: Path) -> None:
    """Write one table for each data set, model and recipe."""
    parts = []
    for key, group in grouped(rows, TABLE).items():
        exact = {peer_of(row): row for row in group if row["method"] == "exact"}
        if len(exact) < sum(row["method"] == "exact" for row in group):
            raise ValueError(f"two exact runs of one seed in {title_of(key)}")
        lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
        settings = grouped(group, LINE)
        for setting in sorted(settings, key=lambda one: (one[2] != "exact", one)):
            runs = settings[setting]
            peers = [exact[one] for one in map(peer_of, runs) if one in exact]
            peers = peers if len(peers) == len(runs) else []
            cells = describe(dict(zip(LINE, setting, strict=True)), runs, peers)
            target = mean(peers, "late_test_acc") - MARGIN if peers else 0.0
            cells.insert(-2, epochs_to(target, runs, curves) if peers else "")
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join([f"## {title_of(key)}", "", *lines]))
    path.write_text("\n\n".join(parts) + "\n")


def peer_of(row: Row) -> tuple[str, ...]:
    """Return what a run has in common with the exact one that it is compared with."""
    return row["clip"], row["seed"]


def seeds_of(rows: Sequence[Row]) -> str:
    """Return the seeds, as "0-2, 5"."""
    seeds = sorted(int(row["seed"]) for row in rows)
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in parts)


def title_of(key: Sequence[str]) -> str:
    """Return what the runs of one table have in common."""
    dataset, model, layers, recipe, epochs, anneal = key
    title = f"{dataset}, {layers}-layer {model}, recipe {recipe}, {epochs} epochs"
    return title + (f", the last {anneal} annealed" if anneal != "0" else "")


def others_of(setting: Mapping[str, str]) -> list[str]:
    """Return the options of a line that are not the usual ones."""
    others = [f"order {setting['order']}"] if setting["order"] != "shuffled" else []
    others += [f"clip {setting['clip']}"] if float(setting["clip"]) else []
    others += [f"warm-up {setting['warmup']}"] if setting["warmup"] != "1" else []
    return others + (["adaptive"] if setting["adaptive"] != "0" else [])


def grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows by their values of `names`, in the order in which they come."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of one figure over the rows."""
    return statistics.mean(float(row[name]) for row in rows)


def epochs_to(target: float, rows: Sequence[Row], curves: Path) -> str:
    """Return after how many epochs the runs reach a test accuracy, the median over them.

    Empty where the curves of a run are not there.
    """
    found = []
    if not has_curves(rows, curves):
        return ""
    for row in rows:
        accuracies = read_curves(curves / f"{row['name']}.csv")["test_acc"]
        ends = range(NUM_SMOOTHED, len(accuracies) + 1)
        means = ((end, statistics.mean(accuracies[end - NUM_SMOOTHED : end])) for end in ends)
        found.append(next((end for end, value in means if value >= target), float("inf")))
    middle = statistics.median(found)
    return "never" if middle == float("inf") else f"{middle:.0f}"


def has_curves(rows: Sequence[Row], curves: Path) -> bool:
    """Return whether the curves of all runs are there."""
    return all((curves / f"{row['name']}.csv").exists() for row in rows)


def read_curves(path: Path) -> dict[str, list[float]]:
    """Return the columns of a file of curves."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def describe(setting: Mapping[str, str], rows: Sequence[Row], peers: Sequence[Row]) -> list[str]:
    """Return the cells of one line; `peers` are exact runs of the same seeds."""
    is_exact = setting["method"] == "exact"
    accuracies = [100 * float(row["test_acc"]) for row in rows]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    test = statistics.mean(accuracies)
    change = f"{test - 100 * mean(peers, 'test_acc'):+.1f}" if peers and not is_exact else ""
    return [
        "" if is_exact else f"{100 * mean(rows, 'cut_frac'):.0f} %",
        *("" if is_exact else setting[name] for name in LINE[:2]),
        setting["method"],
        ", ".join(others_of(setting)),
        seeds_of(rows),
        f"{test:.1f} ± {spread:.1f}",
        change,
        f"{100 * mean(rows, 'late_test_acc'):.1f}",
        f"{100 * max(float(row['test_swing']) for row in rows):.1f}",
        f"{mean(rows, 'late_train_loss'):.3f}",
        f"{1000 * mean(rows, 'epoch_s'):.0f}",
    ]
