"""Forecasts of layouts: costs measured in one process, steps by closed forms."""

from lightning_gnnpipe.planning.closed_forms import LayoutWork, Link, factorize, time_layout
from lightning_gnnpipe.planning.forecast import expect_steps, ranks_at_once
from lightning_gnnpipe.planning.from_module import plan_pipeline
from lightning_gnnpipe.planning.pipeline_plan import PipelinePlan, write_layout
