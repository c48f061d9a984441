"""Draw a measured training step: one row a rank, time to the right, idle time grey."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

FORWARD, BACKWARD, IDLE = "#4477aa", "#ee8866", "#e8e8e8"
COLOURS = {"F": FORWARD, "B": BACKWARD}
BAR_HEIGHT = 0.8
FIGURE_INCHES = 12.0
LABEL_INCHES = 0.16  # room that a chunk's number needs


class Event(Protocol):
    """What is drawn of a trace: an action such as ``0F3`` (stage 0, forward, chunk 3) in time."""

    @property
    def rank(self) -> int: ...
    @property
    def action(self) -> str: ...
    @property
    def start_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...


def draw_timeline(events: Iterable[Event], path: Path, title: str) -> None:
    """Write a picture of the forward and backward actions among ``events`` to ``path``."""
    boxes = [(event, *parsed) for event in events if (parsed := _parse_compute(event.action))]
    if not boxes:
        raise ValueError("Expected forward or backward actions in the trace (got none).")
    start_us = min(event.start_us for event, _, _ in boxes)
    span_ms = (max(event.end_us for event, _, _ in boxes) - start_us) / 1e3
    num_ranks = max(event.rank for event, _, _ in boxes) + 1

    figure, axes = plt.subplots(
        figsize=(FIGURE_INCHES, 1.6 + 0.7 * num_ranks), layout="constrained"
    )
    for rank in range(num_ranks):
        axes.barh(rank, span_ms, height=BAR_HEIGHT, color=IDLE)
    for event, op, chunk in boxes:
        left_ms = (event.start_us - start_us) / 1e3
        width_ms = (event.end_us - event.start_us) / 1e3
        axes.barh(
            event.rank,
            width_ms,
            left=left_ms,
            height=BAR_HEIGHT,
            color=COLOURS[op],
            edgecolor="white",
            linewidth=0.6,
        )
        if width_ms / span_ms * FIGURE_INCHES > LABEL_INCHES * len(chunk) ** 0.5:
            middle_ms = left_ms + width_ms / 2
            axes.text(middle_ms, event.rank, chunk, ha="center", va="center", color="white", size=8)

    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, span_ms)
    axes.set_xlabel("time in the training step [ms]; the number in a box is its chunk")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    legend = {"forward": FORWARD, "backward": BACKWARD, "idle or sending": IDLE}
    axes.legend(
        handles=[Patch(color=colour, label=label) for label, colour in legend.items()],
        ncols=len(legend),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _parse_compute(action: str) -> tuple[str, str] | None:
    """Return kind and chunk of ``0F3`` or ``1B2``; None for an action that does not compute."""
    match = re.fullmatch(r"\d+([FB])(\d+)", action)
    return (match[1], match[2]) if match else None
