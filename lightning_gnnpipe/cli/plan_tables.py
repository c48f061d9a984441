"""The tables that `gnnpipe plan` prints."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_gnnpipe.planning import LayoutForecast, PipelinePlan

_MIB = 2**20


def print_plan(plan: PipelinePlan, console: Console) -> None:
    """Print `plan` as tables, with the advice."""
    console.print(_model_table(plan))
    console.print(_graph_table(plan))
    console.print(_step_table(plan))
    for line in plan.advice:
        console.print(f"[yellow]![/] {escape(line)}")


def _model_table(plan: PipelinePlan) -> Table:
    title = f"Model: {len(plan.layer_names)} layers in {len(plan.stages)} stages"
    columns = ("stage", "layers", "forward + backward [ms]", "parameters", "memory [MiB]")
    table = _table(title, *columns, left="layers")
    for index, stage in enumerate(plan.stages):
        last = stage.first_layer + stage.num_layers - 1
        names = plan.layer_names[stage.first_layer], plan.layer_names[last]
        table.add_row(
            str(index),
            names[0] if stage.num_layers == 1 else f"{names[0]} .. {names[1]} ({stage.num_layers})",
            f"{stage.compute_s * 1e3:,.0f}",
            f"{stage.num_parameters:,}",
            f"{stage.memory_bytes / _MIB:,.0f}",
        )
    return table


def _graph_table(plan: PipelinePlan) -> Table:
    title = f"Graph: {plan.num_nodes:,} nodes, {plan.num_edges:,} edges"
    kind = f"{len(plan.chunk_rows)} chunks"
    table = _table(title, kind, "fewest", "most", "sum", left=kind)
    counts = {"nodes": plan.chunk_rows, "edges": plan.chunk_edges, "halo nodes": plan.halo_rows}
    for name, own in counts.items():
        table.add_row(name, f"{min(own):,}", f"{max(own):,}", f"{sum(own):,}")
    table.add_row("edges between chunks", "", "", f"{100 * plan.edge_cut_frac:.1f} %")
    return table


def _step_table(plan: PipelinePlan) -> Table:
    """Make one row a layout; the layout of the plan is bold, the best has a star."""
    link = f"{plan.link_gbit_per_s:g} Gbit/s and {plan.message_us:g} us per message"
    columns = ("stages x shards", "", "seconds", "bytes", "idle", "memory [MiB]")
    table = _table(f"A training step, with links of {link}", *columns, left="")
    table.caption = f"* best for {math.prod(plan.layout)} devices: {plan.best.options}"
    if plan.plain_s is not None and plan.plain_bytes is not None:
        memory = f"{plan.plain_bytes / _MIB:,.0f}"
        table.add_row("", "plain Trainer", f"{plan.plain_s:.3f}", "0", "", memory)
    table.add_row("", "one device", f"{plan.one_device_s:.3f}", "0", "", "")
    for one in plan.layouts:
        table.add_row(
            f"{'* ' if one == plan.best else ''}{one.num_stages} x {one.num_shards}",
            _kind_of(one),
            f"{one.step_s:.3f}",
            f"{one.step_bytes:,}",
            f"{100 * one.bubble_frac:.1f} %",
            f"{one.memory_bytes / _MIB:,.0f}" + ("" if one.fits else " (too much)"),
            style="bold" if (one.num_stages, one.num_shards) == plan.layout else None,
        )
    return table


def _table(title: str, *columns: str, left: str) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(escape(name), justify="left" if name == left else "right")
    return table


def _kind_of(layout: LayoutForecast) -> str:
    if layout.num_shards == 1:
        return "pipeline" if layout.num_stages > 1 else "chunks"
    return "graph parallel" if layout.num_stages == 1 else "pipeline + graph parallel"
