"""The engine: puts graph, stages, passing, schedule, history and comm together and runs them."""

from __future__ import annotations

from lightning_gnnpipe.engine.agree import Progress, batch_number, graph_of_node, num_nodes
from lightning_gnnpipe.engine.batch_schedules import check_schedule
from lightning_gnnpipe.engine.batches import check_replicas
from lightning_gnnpipe.engine.clipping import clip_by_total_norm
from lightning_gnnpipe.engine.engine import PipelineEngine
from lightning_gnnpipe.engine.forecast import ForecastOptions, forecast
from lightning_gnnpipe.engine.measured import LayoutOptions
from lightning_gnnpipe.engine.model import PipelinedModel
from lightning_gnnpipe.engine.optimizer_states import (
    merge_optimizer_states,
    own_optimizer_state,
)
from lightning_gnnpipe.engine.options import EngineOptions
from lightning_gnnpipe.engine.partitioner import ChunkOptions
from lightning_gnnpipe.engine.pipeline_plan import LayoutForecast, PipelinePlan
from lightning_gnnpipe.engine.plain import is_one_graph
from lightning_gnnpipe.engine.run_state import RankHistories, RunState, SavedRun
from lightning_gnnpipe.engine.scaling import share_overflows
from lightning_gnnpipe.engine.splitting import Balance
from lightning_gnnpipe.engine.state import (
    full_state_dict,
    own_state_dict,
)
from lightning_gnnpipe.engine.switch import switched
from lightning_gnnpipe.engine.trace import PipelineStats, TraceEvent, phases
from lightning_gnnpipe.engine.weights import StageWeights

__all__ = [
    "Balance",
    "ChunkOptions",
    "EngineOptions",
    "ForecastOptions",
    "LayoutForecast",
    "LayoutOptions",
    "PipelineEngine",
    "PipelinePlan",
    "PipelineStats",
    "PipelinedModel",
    "Progress",
    "RankHistories",
    "RunState",
    "SavedRun",
    "StageWeights",
    "TraceEvent",
    "batch_number",
    "check_replicas",
    "check_schedule",
    "clip_by_total_norm",
    "forecast",
    "full_state_dict",
    "graph_of_node",
    "is_one_graph",
    "merge_optimizer_states",
    "num_nodes",
    "own_optimizer_state",
    "own_state_dict",
    "phases",
    "share_overflows",
    "switched",
]
