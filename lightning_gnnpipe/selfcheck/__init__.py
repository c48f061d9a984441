"""Compares the module in chunks with the module on the whole graph, before training."""

from lightning_gnnpipe.selfcheck.batch_check import check_graphs, norms_without_batch
from lightning_gnnpipe.selfcheck.plain import (
    PipelinedMethods,
    is_one_graph,
    own_methods,
    raising_own_errors,
    raising_wrong_arguments,
)
from lightning_gnnpipe.selfcheck.trial import flatten
from lightning_gnnpipe.selfcheck.value_check import check_layers
