"""What the engine refuses before it computes anything: layers that are not right on chunks."""

from __future__ import annotations

import logging

import torch

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.batches import BatchPasses, check_replicas
from lightning_gnnpipe.engine.graph import GraphCache, PlannedGraph
from lightning_gnnpipe.engine.model import PipelinedModel
from lightning_gnnpipe.engine.options import EngineOptions
from lightning_gnnpipe.engine.probe import check_layers
from lightning_gnnpipe.history import DENSE
from lightning_gnnpipe.passing import check_support
from lightning_gnnpipe.stages import Call, Inputs, Layers, is_listed

log = logging.getLogger(__name__)


class EngineChecks:
    """The checks of one engine, each made once.

    Args:
        model: The pipelined model.
        graphs: The graphs that are known.
        batches: Passes over batches of graphs.
        transport: The ranks.
        options: See `EngineOptions`.
    """

    def __init__(
        self,
        model: PipelinedModel,
        graphs: GraphCache,
        batches: BatchPasses,
        transport: Transport,
        options: EngineOptions,
    ) -> None:
        self._model, self._graphs, self._batches = model, graphs, batches
        self._transport, self._options = transport, options
        self._checked: set[bool] = set()
        self._has_warned = False

    @property
    def has_seen_graphs(self) -> bool:
        """Whether there was a batch of several graphs."""
        return True in self._checked

    def support(self, has_graphs: bool) -> None:
        """Refuse layers that are not right on chunks, or options for one graph alone."""
        if has_graphs in self._checked:
            return
        mesh = self._transport.mesh
        if has_graphs:
            self._batches.check()
        else:
            check_replicas(mesh.num_replicas)
            check_support(self._model.module, self._options.chunks.expected, mesh.num_shards)
        self._checked.add(has_graphs)

    def chunks(self, graph: PlannedGraph) -> None:
        """Warn, once, of chunks that stale reads harm, and of an order that favours some edges."""
        if self._has_warned or graph.plan.num_chunks == 1 or graph.plan.is_disjoint:
            return
        self._has_warned = True
        method, has_messages = self._options.histories.method, self._model.intercepted.has_messages
        factor = method.message_scale if has_messages else graph.store.linear_scale
        if not self._transport.world.is_root:
            return
        if graph.cut_frac > DENSE:
            log.warning(
                "%s of all edges lie between chunks, so accuracy may suffer. Use fewer chunks, "
                "partition='metis' or graph_parallel, and compare with num_chunks=1.",
                f"{100 * graph.cut_frac:.0f} %",
            )
        if self._options.chunk_order == "fixed" and factor != 1:
            log.warning(
                "chunk_order='fixed' with a factor of %s on gradients of fresh rows: the same "
                "edges between chunks count more than once in every step. Use another order.",
                f"{factor:g}",
            )

    def layers(self, layers: Layers, call: Call, inputs: Inputs) -> None:
        """Refuse layers of a new trace, while all parameters are here, that chunks change."""
        module, options = self._model.module, self._options
        trains = options.is_fitting and (module.training or torch.is_grad_enabled())
        if inputs.graphs is not None:
            self._batches.check_layers(layers, call, inputs, trains=trains)
            return
        is_cut = self._graphs.is_cut(inputs)
        if options.self_check and (is_cut or is_listed(module)):
            check_layers(module, layers, call, inputs, on_chunks=is_cut, with_gradients=trains)
