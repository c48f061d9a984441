"""Forecasts of layouts: costs measured in one process, steps by closed forms."""

from lightning_gnnpipe.planning.closed_forms import LayoutWork, Link, factorize, time_layout
from lightning_gnnpipe.planning.forecast import expect_steps, ranks_at_once
from lightning_gnnpipe.planning.from_module import plan_pipeline
from lightning_gnnpipe.planning.pipeline_plan import LayoutForecast, PipelinePlan, write_layout

__all__ = [
    "LayoutForecast",
    "LayoutWork",
    "Link",
    "PipelinePlan",
    "expect_steps",
    "factorize",
    "plan_pipeline",
    "ranks_at_once",
    "time_layout",
    "write_layout",
]
