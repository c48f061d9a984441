"""Parts of one step: the module as stages, weights and gradients over ranks, the pass."""

from __future__ import annotations

from lightning_gnnpipe.steps.gradient_sums import (
    average_replicated,
    group_tied,
    without_gradients,
)
from lightning_gnnpipe.steps.model import PipelinedModel
from lightning_gnnpipe.steps.modes import Mode, stages_of_norms
from lightning_gnnpipe.steps.optimizer_states import merge_optimizer_states, own_optimizer_state
from lightning_gnnpipe.steps.partitioner import (
    ChunkOptions,
    EngineOptions,
    Measure,
    Partitioner,
)
from lightning_gnnpipe.steps.step_context import (
    Agreed,
    Controls,
    PassSeeds,
    SignalBits,
    StepContext,
    agree,
    batch_number,
    graph_of_node,
    num_nodes,
)
from lightning_gnnpipe.steps.training import PassRecord, PassState, TrainingPass, join
from lightning_gnnpipe.steps.weight_reads import refuse_evaluations
from lightning_gnnpipe.steps.weights import StageWeights

__all__ = [
    "Agreed",
    "ChunkOptions",
    "Controls",
    "EngineOptions",
    "Measure",
    "Mode",
    "Partitioner",
    "PassRecord",
    "PassSeeds",
    "PassState",
    "PipelinedModel",
    "SignalBits",
    "StageWeights",
    "StepContext",
    "TrainingPass",
    "agree",
    "average_replicated",
    "batch_number",
    "graph_of_node",
    "group_tied",
    "join",
    "merge_optimizer_states",
    "num_nodes",
    "own_optimizer_state",
    "refuse_evaluations",
    "stages_of_norms",
    "without_gradients",
]
