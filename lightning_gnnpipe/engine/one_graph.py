"""Detects single graphs that come with a batch vector; they are cut into chunks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.selfcheck import is_one_graph
from lightning_gnnpipe.steps import EngineOptions


class OneGraph:
    """Distinguishes single graphs from batches of graphs; with replicas all calls are batches."""

    def __init__(self, module: nn.Module, transport: Transport, options: EngineOptions) -> None:
        self._module, self._options = module, options
        self._has_replicas = transport.world.num_replicas > 1
        self._is_one: bool | None = None  # cached for all-zero batch vectors

    def batch_vector(self, vector: Tensor | None, has_seen_graphs: bool) -> Tensor | None:
        """Return the user's batch vector, `[num_nodes]`; None if the batch is a single graph."""
        if vector is None or self._has_replicas or has_seen_graphs or int(vector[-1]) > 0:
            return vector
        return None

    def of(self, call: Call, in_batch: Tensor | None, has_seen_graphs: bool) -> Call:
        """Return the call, marked if it is of a single graph (all-zero vector, one row a node).

        A PyG `Batch` (`in_batch`) does not count: later batches of its loader may hold several
        graphs.
        """
        vector = call.batch_vector
        if vector is None or self._has_replicas or has_seen_graphs:
            return call
        if in_batch is not None or vector.any():
            return call
        if vector.numel() < self._options.chunks.expected:  # too small to be cut
            return call
        if self._is_one is None:
            self._is_one = is_one_graph(self._module, call)
        return replace(call, is_one_graph=self._is_one)
