"""The tables of `gnnpipe plan`: a plan goes in, text on a console comes out."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_gnnpipe.engine import PipelinePlan

_MIB = 2**20


def print_plan(plan: PipelinePlan, console: Console) -> None:
    """Print `plan` as three tables and the advice."""
    console.print(_model_table(plan))
    console.print(_graph_table(plan))
    console.print(_step_table(plan))
    for line in plan.advice:
        console.print(f"[yellow]![/] {line}")


def _model_table(plan: PipelinePlan) -> Table:
    table = Table(title=f"Model: {len(plan.layer_names)} layers in {len(plan.stages)} stages")
    for name in ("stage", "layers", "forward + backward [ms]", "parameters", "memory [MiB]"):
        table.add_column(name, justify="left" if name == "layers" else "right")
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
    table = Table(title=f"Graph: {plan.num_nodes:,} nodes, {plan.num_edges:,} edges")
    for name in (f"{len(plan.chunk_rows)} chunks", "least", "most", "sum"):
        table.add_column(
            name, justify="right" if name != f"{len(plan.chunk_rows)} chunks" else "left"
        )
    for name, counts in (
        ("nodes", plan.chunk_rows),
        ("edges", plan.chunk_edges),
        ("nodes read of others", plan.halo_rows),
    ):
        table.add_row(name, f"{min(counts):,}", f"{max(counts):,}", f"{sum(counts):,}")
    table.add_row("edges between chunks", "", "", f"{100 * plan.edge_cut_frac:.1f} %")
    return table


def _step_table(plan: PipelinePlan) -> Table:
    table = Table(title=f"A training step, links of {plan.link_gbit_per_s:g} Gbit/s")
    for name in ("", "one device", "pipeline", "graph parallel"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row(
        "seconds, predicted",
        f"{plan.one_device_s:.3f}",
        f"{plan.step_s:.3f}",
        f"{plan.graph_parallel_s:.3f}",
    )
    table.add_row("bytes", "0", f"{plan.step_bytes:,}", f"{plan.graph_parallel_bytes:,}")
    table.add_row("idle share", "", f"{100 * plan.bubble_frac:.1f} %", "")
    return table
