"""`gnnpipe plan FILE:FUNCTION`: print a forecast of training in a pipeline.

FUNCTION takes no arguments and returns a LightningModule and its data.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_gnnpipe.engine import PipelinePlan
from lightning_gnnpipe.errors import ConfigError, GNNPipeError, explain
from lightning_gnnpipe.strategy import GNNPipeStrategy

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise ImportError(
        "Expected 'rich', to print tables (got no such package). "
        'pip install "lightning-gnnpipe[examples]".'
    ) from error

_MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    try:
        module, data = _load(options.target)()
        strategy = GNNPipeStrategy(num_chunks=options.chunks, partition=options.partition)
        plan = strategy.plan(
            module, data, num_stages=options.stages, link_gbit_per_s=options.link_gbit
        )
    except GNNPipeError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        return 1
    print_plan(plan, Console())
    return 0


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


def _load(target: str) -> Any:
    name, _, function = target.rpartition(":")
    path = Path(name)
    if not name or not path.is_file():
        raise ConfigError(
            explain(
                expected="FILE:FUNCTION to name a Python file and a function in it",
                found=target,
                remedy="Write train.py:make, for instance, where make() returns a LightningModule "
                "and its data.",
            )
        )
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    if not callable(getattr(loaded, function, None)):
        raise ConfigError(
            explain(
                expected=f"a function '{function}' in {path}",
                found="none",
                remedy="It takes no arguments and returns a LightningModule and its data.",
            )
        )
    return getattr(loaded, function)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def count(text: str) -> int | str:
        return text if text == "auto" else int(text)

    parser = argparse.ArgumentParser(prog="gnnpipe", description="GNNs in a pipeline of layers.")
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser("plan", help="print how model and graph would be cut, and how fast")
    add = plan.add_argument
    add("target", metavar="FILE:FUNCTION", help="returns a LightningModule and its data")
    add("--stages", type=int, default=2, help="pipeline stages, S (default: 2)")
    add("--chunks", type=count, default="auto", help="chunks of the graph, K (default: 4 a stage)")
    add("--partition", default="metis", choices=["metis", "random", "contiguous"])
    add("--link-gbit", type=float, default=10.0, help="link speed in Gbit/s (default: 10)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
