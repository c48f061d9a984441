"""Parts of one step: the module as stages, weights and gradients over ranks, the pass."""

from lightning_gnnpipe.steps.model import Mode, PipelinedModel, stages_of_norms
from lightning_gnnpipe.steps.staged_weights import StagedWeights
from lightning_gnnpipe.steps.step_context import (
    Controls,
    PassSeeds,
    graph_of_node,
    num_nodes,
    stored_graph,
)
from lightning_gnnpipe.steps.training import TrainingPass
