"""The finished cells of the study as pictures: curves of each setting, and accuracy by cut."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate, cycle, product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from tables import LINE, TABLE, Row, grouped, has_curves, mean, others_of, read_curves, title_of

STYLES = [
    {"ls": dashes, "color": f"C{number}", "lw": 1.0} for dashes, number in product("-:", range(10))
]


def draw(rows: Sequence[Row], curves: Path, folder: Path) -> None:
    """Write pictures for each data set and model: over epochs and seconds, and by cut."""
    for key, group in grouped(rows, TABLE).items():
        name = "_".join(key)
        if any(has_curves(rows, curves) for rows in grouped(group, LINE).values()):
            figure = draw_curves(group, curves)
            figure.suptitle(title_of(key))
            figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
            plt.close(figure)
        figure = draw_by_cut(group)
        figure.savefig(folder / f"{name}_cut.png", dpi=120, bbox_inches="tight")
        plt.close(figure)


def draw_curves(group: Sequence[Row], folder: Path) -> Figure:
    """Return test accuracy and training loss, means over the seeds, over epochs and seconds."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), sharey="row", layout="constrained")
    styles = cycle(STYLES)
    for setting, rows in grouped(group, LINE).items():
        if not has_curves(rows, folder):
            continue
        runs = [read_curves(folder / f"{row['name']}.csv") for row in rows]
        seconds = means([list(accumulate(run["seconds"])) for run in runs])
        is_exact = setting[2] == "exact"
        named = dict(zip(LINE, setting, strict=True))
        label = ", ".join([f"{setting[2]}, {setting[0]} K={setting[1]}", *others_of(named)])
        label = "exact" if is_exact else label
        style = {"color": "black", "lw": 2.0} if is_exact else next(styles)
        for line, name in zip(axes, ("test_acc", "train_loss"), strict=True):
            values = means([run[name] for run in runs])
            line[0].plot(values, label=label, **style)
            line[1].plot(seconds, values, **style)
            line[0].set_ylabel(name)
    axes[1][1].set_yscale("log")
    axes[1][0].set_yscale("log")
    axes[1][0].set_xlabel("epochs")
    axes[1][1].set_xlabel("seconds of training")
    axes[0][0].legend(fontsize="small")
    return figure


def draw_by_cut(group: Sequence[Row]) -> Figure:
    """Return test accuracy at the best validation accuracy against the share of edges cut."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for key, rows in grouped(group, LINE[2:]).items():
        named = dict(zip(LINE[2:], key, strict=True))
        label = ", ".join([named["method"], *others_of(named)])
        points = sorted(
            (100 * mean(one, "cut_frac"), [100 * float(row["test_acc"]) for row in one])
            for one in grouped(rows, LINE).values()
        )
        if named["method"] == "exact":
            axis.axhline(statistics.mean(points[0][1]), color="black", lw=1, label="exact")
            continue
        cuts = [cut for cut, _ in points]
        axis.plot(cuts, [statistics.mean(values) for _, values in points], "o-", label=label)
        for cut, values in points:
            axis.plot([cut, cut], [min(values), max(values)], color="grey", lw=0.8)
    axis.set_xlabel("edges between chunks [%]")
    axis.set_ylabel("test accuracy [%]")
    axis.legend(fontsize="small")
    return figure


def means(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each epoch over the runs."""
    return [statistics.mean(values) for values in zip(*runs, strict=True)]
