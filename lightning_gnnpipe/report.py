"""Reports: a training step as a picture and as a trace for Perfetto, the table of stages.

The picture has one row per rank, time to the right:

    rank 0  |F2|F0|F3|F1|#####|      |#####|B1|B3|B0|B2|
    rank 1  |##|F2|F0|F3|F1|   loss   |B1|B3|B0|B2|####|

Idle time within a phase is grey; time between the phases (outputs, loss) is white.

The trace is in Chrome's "Trace Event Format": thread 0 shows the phases, thread 1 + r rank r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_gnnpipe.chunks import LayerNames, PipelineStats, TraceEvent, phases
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.stages import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD, BACKWARD, IDLE = "#4477aa", "#c8553d", "#d5d5d5"
COLOURS = {"forward": FORWARD, "backward": BACKWARD, "idle (bubble)": IDLE}

_LEAST_INCHES, _MOST_INCHES = 12.0, 26.0
_MARGIN_INCHES = 1.0  # width of the row names
_FONT_SIZES = (9, 8, 7, 6, 5)
_DIGIT_WIDTH = 0.64 / 72  # inches per digit, at font size 1
_DIGIT_HEIGHT = 0.9 / 72
_PADDING_INCHES = 0.03
_BAR_HEIGHT = 0.84
_CENTRED: Any = {"ha": "center", "va": "center"}
_HEADINGS = ("stage", "layers", "parameters", "cost [ms]")
_LEFT = 1  # the left-aligned column


def check_matplotlib() -> None:
    """Raise ImportError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ImportError(
            explain(
                expected="the package 'matplotlib' to be installed, to draw a timeline",
                found="no such package",
                remedy="Run: pip install matplotlib",
            )
        )


def timeline_title(stats: PipelineStats, epoch: int | None = None) -> str:
    """Return one line about the step, with its idle share.

    At best that share is (S - 1) / (K + S - 1), with equal costs and free transfers.
    """
    stages, chunks = stats.num_stages, stats.num_chunks
    least = (stages - 1) / (chunks + stages - 1)
    kind = "exact step" if stats.is_exact else f"{chunks} chunk{'s' if chunks > 1 else ''}"
    start = "" if epoch is None else f"Epoch {epoch}: "
    replicas = f"{stats.num_replicas} replicas of " if stats.num_replicas > 1 else ""
    return (
        f"{start}{replicas}{stages} stage{'s' if stages > 1 else ''}, {kind}, bubble share "
        f"{stats.bubble_frac:.1%} (at best {least:.1%})"
    )


def draw_timeline(events: Sequence[TraceEvent], title: str) -> Figure:
    """Return a picture of `events`."""
    check_matplotlib()
    from matplotlib.figure import Figure

    if not events:
        raise ConfigError(
            expected="chunks in the trace",
            found="none",
            remedy="Finish a training step first.",
        )
    span_us = max(e.end_us for e in events) - min(e.start_us for e in events)
    num_ranks = max(e.rank for e in events) + 1
    inches_per_us, font_size = _scale(events, span_us)
    width = inches_per_us * span_us + _MARGIN_INCHES
    figure = Figure(figsize=(width, 1.7 + 0.55 * num_ranks), layout="constrained")
    axes = figure.subplots()
    _draw_phases(axes, events, num_ranks)
    _draw_boxes(axes, events, inches_per_us, font_size)
    _label(figure, axes, title, num_ranks, events)
    return figure


def _scale(events: Sequence[TraceEvent], span_us: float) -> tuple[float, int]:
    """Return inches per microsecond, and a font size at which most numbers fit their boxes."""
    digits = max(len(str(event.chunk)) for event in events)
    widths_us = sorted(event.end_us - event.start_us for event in events)
    usual_us = widths_us[len(widths_us) // 5]  # four in five are at least as wide
    least, most = ((inches - _MARGIN_INCHES) / span_us for inches in (_LEAST_INCHES, _MOST_INCHES))
    needed = (digits * _FONT_SIZES[1] * _DIGIT_WIDTH + _PADDING_INCHES) / max(usual_us, 1e-9)
    scale = min(max(needed, least), most)
    room = usual_us * scale - _PADDING_INCHES
    fitting = [size for size in _FONT_SIZES if digits * size * _DIGIT_WIDTH <= room]
    return scale, fitting[0] if fitting else _FONT_SIZES[-1]


def _draw_phases(axes: Axes, events: Sequence[TraceEvent], num_ranks: int) -> None:
    spans = phases(events)
    for rank in range(num_ranks):
        bars: Any = [(start / 1e3, (end - start) / 1e3) for start, end in spans]
        axes.broken_barh(bars, (rank - _BAR_HEIGHT / 2, _BAR_HEIGHT), color=IDLE, linewidth=0)
    if len(spans) == 2 and spans[1][0] > spans[0][1]:
        middle_ms = (spans[0][1] + spans[1][0]) / 2e3
        place = middle_ms, (num_ranks - 1) / 2
        axes.text(*place, "outputs, loss", rotation=90, color="#666666", size=7, **_CENTRED)


def _draw_boxes(
    axes: Axes,
    events: Sequence[TraceEvent],
    inches_per_us: float,
    font_size: int,
) -> None:
    for event in events:
        width_us = event.end_us - event.start_us
        axes.broken_barh(
            [(event.start_us / 1e3, width_us / 1e3)],
            (event.rank - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolor=COLOURS[event.phase],
            edgecolor="white",
            linewidth=0.5,
        )
        text, width = str(event.chunk), width_us * inches_per_us
        is_upright = len(text) * font_size * _DIGIT_WIDTH <= width
        if is_upright or font_size * _DIGIT_HEIGHT <= width:
            place = (event.start_us + width_us / 2) / 1e3, event.rank
            turn = 0 if is_upright else 90
            axes.text(*place, text, rotation=turn, color="white", size=font_size, **_CENTRED)


def _label(
    figure: Figure, axes: Axes, title: str, num_ranks: int, events: Sequence[TraceEvent]
) -> None:
    from matplotlib.patches import Patch

    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_xlim(min(e.start_us for e in events) / 1e3, max(e.end_us for e in events) / 1e3)
    axes.set_xlabel("time in the training step [ms]; the number in a box is its chunk")
    axes.set_title(title, loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in COLOURS.items()],
        ncols=len(COLOURS),
        loc="outside lower right",
        frameon=False,
    )


def chrome_trace(stats: PipelineStats, title: str = "training step") -> dict[str, Any]:
    """Return the trace of a step, ready for `json.dump`; the viewer shows `title`."""
    return {
        "traceEvents": [*_names(stats, title), *_phases(stats), *_actions(stats)],
        "displayTimeUnit": "ms",
        "otherData": {
            "num_stages": stats.num_stages,
            "num_chunks": stats.num_chunks,
            "is_exact": stats.is_exact,
            "bubble_frac": stats.bubble_frac,
            "wait_s": list(stats.wait_s),
            "bytes_by_kind": stats.bytes_by_kind,
        },
    }


def _names(stats: PipelineStats, title: str) -> list[dict[str, Any]]:
    threads = ["phase", *(" ".join(name) for name in stats.rank_names())]
    named = [_event("M", 0, "process_name", args={"name": title})]
    for thread, name in enumerate(threads):
        named.append(_event("M", thread, "thread_name", args={"name": name}))
        named.append(_event("M", thread, "thread_sort_index", args={"sort_index": thread}))
    return named


def _event(kind: str, thread: int, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "pid": 0, "tid": thread, "name": name, **more}


def _phases(stats: PipelineStats) -> list[dict[str, Any]]:
    found = phases(stats.events)
    named = list(zip(("forward", "backward"), found, strict=False))
    if len(found) == 2:
        named.append(("outputs, loss", (found[0][1], max(found[0][1], found[1][0]))))
    return [
        _event("X", 0, name, cat="phase", ts=start, dur=end - start) for name, (start, end) in named
    ]


def _actions(stats: PipelineStats) -> list[dict[str, Any]]:
    found = []
    for event in stats.events:
        name, time = f"{event.phase[0].upper()}{event.chunk}", event.end_us - event.start_us
        stage = event.rank // stats.num_shards % stats.num_stages
        args = {"stage": stage, "chunk": event.chunk, "wait_us": event.wait_us}
        span = {"cat": event.phase, "ts": event.start_us, "dur": time, "args": args}
        found.append(_event("X", 1 + event.rank, name, **span))
    return found


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage; or, with `index=None`, the parameters outside of the pipelined module.

    Attributes:
        num_parameters: Parameter values; a parameter of several stages counts on the first.
        cost_s: Seconds of its layers, scaled to a training step; None if not measured.
        repeated: Names of earlier layers that the stage computes again.
    """

    index: int | None
    layers: tuple[str, ...]
    num_parameters: int
    cost_s: float | None
    repeated: tuple[str, ...] = ()


def describe_stages(
    root: nn.Module,
    pipelined: nn.Module,
    stages: Sequence[Stage],
    users: Mapping[str, set[int]],
    costs: Sequence[float],
) -> tuple[StageRow, ...]:
    """Return a row for each stage, and one for the rest of `root` if it has parameters.

    `users`: by name, the stages that use a parameter or buffer of `pipelined`. `costs`: seconds by
    stage; empty if not measured.
    """
    sizes = {name: p.numel() for name, p in pipelined.named_parameters()}
    owners = {name: min(users[name]) for name in sizes if users.get(name)}
    names = LayerNames(pipelined)
    rows = []
    for stage in stages:
        layers = tuple(names.of(segment) for segment in stage.segments)
        own = sum(size for name, size in sizes.items() if owners.get(name) == stage.index)
        cost_s = costs[stage.index] if costs else None
        again = tuple(name for part in stage.repeated for name in names.of_repeated(part))
        rows.append(StageRow(stage.index, layers, own, cost_s, again))
    rest = sum(p.numel() for p in root.parameters()) - sum(row.num_parameters for row in rows)
    return (*rows, StageRow(None, (), rest, None)) if rest else tuple(rows)


def format_stages(rows: Sequence[StageRow], num_columns: int = 100) -> str:
    """Return `rows` as a table of `num_columns` characters, drawn by rich if installed."""
    table = [_HEADINGS, *map(_table_cells, rows)]
    if all(row.cost_s is None for row in rows):
        table = [line[:-1] for line in table]
    num_stages = sum(row.index is not None for row in rows)
    num_layers = sum(len(row.layers) for row in rows)
    title = f"Pipeline: {num_layers} layers in {num_stages} stage{'s' if num_stages > 1 else ''}"
    if find_spec("rich"):
        return _draw_rich_table(title, table, num_columns)
    return _draw_table(title, table)


def _table_cells(row: StageRow) -> tuple[str, ...]:
    if row.index is None:
        return "all", "outside the pipelined module", f"{row.num_parameters:,}", ""
    first, last = row.layers[0], row.layers[-1]
    layers = first if len(row.layers) == 1 else f"{first} .. {last} ({len(row.layers)})"
    return (
        str(row.index),
        ", ".join([*(f"{name} (repeated)" for name in row.repeated), layers]),
        f"{row.num_parameters:,}",
        "" if row.cost_s is None else f"{row.cost_s * 1e3:,.1f}",
    )


def _draw_rich_table(title: str, table: Sequence[Sequence[str]], num_columns: int) -> str:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    for column, heading in enumerate(table[0]):
        drawn.add_column(heading, justify="left" if column == _LEFT else "right")
    for line in table[1:]:
        drawn.add_row(*line)
    text = StringIO()
    Console(file=text, width=num_columns, markup=False).print(drawn)
    return text.getvalue().rstrip()


def _draw_table(title: str, table: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(
            text.ljust(width) if column == _LEFT else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    return "\n".join([title, *lines])
