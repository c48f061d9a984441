"""PyG's layers on one chunk: interception, edge normalisation, norms, and checks."""

from lightning_gnnpipe.layers.intercept import (
    Intercepted,
    find_convs,
    find_layers,
    intercept,
    without_memory,
)
from lightning_gnnpipe.layers.native import NativeContext
from lightning_gnnpipe.layers.statistics import tracks_statistics, uses_batch_statistics
from lightning_gnnpipe.layers.support import (
    check_graph_batches,
    check_norms,
    check_replicas,
    check_support,
)
