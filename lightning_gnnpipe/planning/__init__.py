"""Forecasts of layouts: costs measured in one process, steps timed by formula."""

from lightning_gnnpipe.planning.from_module import plan_pipeline
from lightning_gnnpipe.planning.measured import Link
from lightning_gnnpipe.planning.pipeline_plan import LayoutForecast, PipelinePlan
from lightning_gnnpipe.planning.schedule_layout import LayoutWork, factorize, simulate_layout

__all__ = [
    "LayoutForecast",
    "LayoutWork",
    "Link",
    "PipelinePlan",
    "factorize",
    "plan_pipeline",
    "simulate_layout",
]
