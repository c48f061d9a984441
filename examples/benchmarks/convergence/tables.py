"""The finished cells of the study as Markdown: mean and spread over the seeds of each setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]

# What a table has in common, and what its lines differ in.
TABLE = ("dataset", "model", "layers", "epochs")
LINE = ("partition", "chunks", "method", "order", "warmup", "clip")
HEADER = (
    "cut",
    *LINE[:3],
    "setting",
    "seeds",
    "test, %",
    "to exact",
    "last 20 epochs, %",
    "worst fall at the end",
    "train loss",
    "ms an epoch",
)


def write_tables(rows: Sequence[Row], path: Path) -> None:
    """Write one table for each data set and model."""
    parts = []
    for key, group in grouped(rows, TABLE).items():
        exact = [row for row in group if row["method"] == "exact"]
        reference = mean(exact, "test_acc") if exact else None
        lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
        settings = grouped(group, LINE)
        for setting in sorted(settings, key=lambda one: (one[2] != "exact", one)):
            cells = describe(dict(zip(LINE, setting, strict=True)), settings[setting], reference)
            lines.append("| " + " | ".join(cells) + " |")
        dataset, model, layers, epochs = key
        title = f"## {dataset}, {layers}-layer {model}, {epochs} epochs"
        parts.append("\n".join([title, "", *lines]))
    path.write_text("\n\n".join(parts) + "\n")


def grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows by their values of `names`, in the order in which they come."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of one figure over the rows."""
    return statistics.mean(float(row[name]) for row in rows)


def describe(setting: Mapping[str, str], rows: Sequence[Row], reference: float | None) -> list[str]:
    """Return the cells of one line."""
    is_exact = setting["method"] == "exact"
    accuracies = [100 * float(row["test_acc"]) for row in rows]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    test = statistics.mean(accuracies)
    change = "" if reference is None or is_exact else f"{test - 100 * reference:+.1f}"
    others = [f"order {setting['order']}"] if setting["order"] != "shuffled" else []
    others += [f"clip {setting['clip']}"] if float(setting["clip"]) else []
    others += [f"warm-up {setting['warmup']}"] if setting["warmup"] != "1" else []
    return [
        "" if is_exact else f"{100 * mean(rows, 'cut_frac'):.0f} %",
        *("" if is_exact else setting[name] for name in LINE[:2]),
        setting["method"],
        ", ".join(others),
        str(len(rows)),
        f"{test:.1f} ± {spread:.1f}",
        change,
        f"{100 * mean(rows, 'late_test_acc'):.1f}",
        f"{100 * max(float(row['test_swing']) for row in rows):.1f}",
        f"{mean(rows, 'late_train_loss'):.3f}",
        f"{1000 * mean(rows, 'epoch_s'):.0f}",
    ]
