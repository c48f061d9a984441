"""The table of stages: which layers each one computes, their parameters and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_gnnpipe.chunks import LayerNames
from lightning_gnnpipe.stages import Stage
from lightning_gnnpipe.types import Weights

_HEADINGS = ("stage", "layers", "parameters", "cost [ms]")
_LEFT = 1  # the left-aligned column
_MIB = 2**20


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


def format_stages(rows: Sequence[StageRow]) -> str:
    """Return `rows` as a table."""
    table = [_HEADINGS, *map(_table_cells, rows)]
    if all(row.cost_s is None for row in rows):
        table = [line[:-1] for line in table]
    num_stages = sum(row.index is not None for row in rows)
    num_layers = sum(len(row.layers) for row in rows)
    title = f"Pipeline: {num_layers} layers in {num_stages} stage{'s' if num_stages > 1 else ''}"
    return _draw_table(title, table)


def compare_weights(sent: Mapping[Weights, int]) -> str:
    """Return which value of the strategy's `weights` sends less, of `sent` bytes a step."""
    less, more = sorted(sent, key=lambda one: (sent[one], one != "whole"))
    return (
        f"weights='{less}' sends {sent[less] / _MIB:,.1f} MiB a step, "
        f"'{more}' {sent[more] / _MIB:,.1f} MiB."
    )


def compare_times(costs: Sequence[float], num_chunks: int, num_shards: int) -> str:
    """Return seconds of computing on these stages, and on one device, by `costs` of stages."""
    share = (num_chunks + len(costs) - 1) / num_chunks / num_shards
    return (
        f"Computing a step takes about {max(costs) * share:.3f} s in {num_chunks} chunks, and "
        f"{sum(costs):.3f} s on one device with one chunk."
    )


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
