"""Single graphs that come with a batch vector: they are cut into chunks, not into micro-batches."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.selfcheck import is_one_graph
from lightning_gnnpipe.steps import EngineOptions, StepContext


class OneGraph:
    """Tells a single graph from a batch of graphs.

    Args:
        module: The pipelined module.
        transport: The ranks; with replicas all calls are batches.
        options: See `EngineOptions`.
        progress: Has the batch vector of the user's batch.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, options: EngineOptions, progress: StepContext
    ) -> None:
        self._module, self._options, self._progress = module, options, progress
        self._has_replicas = transport.world.num_replicas > 1
        self._is_one: bool | None = None  # where batch vectors are all zeros

    def batch_vector(self, has_seen_graphs: bool) -> Tensor | None:
        """Return the batch vector of the user's batch; None for a single graph.

        Args:
            has_seen_graphs: Whether a call of this run had several graphs.
        """
        vector = self._progress.graph_of_node
        if vector is None or self._has_replicas or has_seen_graphs or int(vector[-1]) > 0:
            return vector
        return None

    def of(self, call: Call, has_seen_graphs: bool) -> Call:
        """Return the call as one of a single graph, if it is.

        Its batch vector is all zeros, and outputs have one row a node. A PyG `Batch` is one of a
        loader, whose other batches may hold several. For `has_seen_graphs` see `batch_vector`.
        """
        vector = call.batch_vector
        if vector is None or self._has_replicas or has_seen_graphs:
            return call
        if self._progress.graph_of_node is not None or vector.any():
            return call
        if vector.numel() < self._options.chunks.expected:  # too small to be cut
            return call
        if self._is_one is None:
            self._is_one = is_one_graph(self._module, call)
        return replace(call, is_one_graph=self._is_one)
