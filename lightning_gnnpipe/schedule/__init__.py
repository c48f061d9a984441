"""Pipeline schedules as data: for each rank, the list of its actions in one step."""

from __future__ import annotations

from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import (
    Loss,
    Schedule,
    StaleRead,
    fill_drain,
    interleaved,
    one_f_one_b,
    stale_reads,
    stream,
)
from lightning_gnnpipe.schedule.check import check
from lightning_gnnpipe.schedule.format import format_chart, format_grid
from lightning_gnnpipe.schedule.lower import Arrived, add_transfers, arrived_sends
from lightning_gnnpipe.schedule.simulate import (
    Timeline,
    graph_parallel_bytes,
    pipeline_bytes,
    simulate,
)

__all__ = [
    "Action",
    "Arrived",
    "Loss",
    "Op",
    "Schedule",
    "StaleRead",
    "Timeline",
    "add_transfers",
    "arrived_sends",
    "check",
    "fill_drain",
    "format_chart",
    "format_grid",
    "graph_parallel_bytes",
    "interleaved",
    "one_f_one_b",
    "pipeline_bytes",
    "simulate",
    "stale_reads",
    "stream",
]
