"""What the engine refuses or warns of before it computes: layers and chunks that do not fit."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.batches import BatchPasses, check_replicas
from lightning_gnnpipe.engine.graph import GraphCache
from lightning_gnnpipe.engine.histories import Histories
from lightning_gnnpipe.engine.hooks import check_hooks
from lightning_gnnpipe.engine.model import PipelinedModel
from lightning_gnnpipe.engine.options import EngineOptions
from lightning_gnnpipe.engine.planned_graph import PlannedGraph
from lightning_gnnpipe.engine.probe import check_layers
from lightning_gnnpipe.fallbacks import Fallbacks
from lightning_gnnpipe.history import DENSE, name_method
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
        self._has_warned_of_cut = self._has_warned_of_order = False
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)

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
            self._tell_of_idle()
        else:
            check_replicas(mesh.num_replicas)
            check_support(self._model.module, self._options.chunks.expected, mesh.num_shards)
        self._checked.add(has_graphs)

    def hooks(self) -> None:
        """Refuse hooks on layers and weights that would not be called as in one whole pass."""
        options, batches = self._options, self._batches
        is_whole = options.chunks.expected == 1 and not self._transport.world.is_distributed
        check_hooks(
            self._model.module,
            is_whole=is_whole and not options.histories.recomputes,
            runs_again=batches.needs_loss,
        )

    def _tell_of_idle(self) -> None:
        """Tell once which of the given options are for one graph alone."""
        chunks, histories = self._options.chunks, self._options.histories
        given = {
            "partition": (
                chunks.partition if isinstance(chunks.partition, str) else "given",
                "metis",
            ),
            "cross_chunk_edges": (chunks.cross_edges, "keep"),
            "chunk_order": (self._options.chunk_order, "shuffled"),
            "staleness": (name_method(histories.method), "drift"),
            "history_dtype": (histories.dtype, None),
            "history_device": (histories.device, None),
        }
        idle = [name for name, (value, default) in given.items() if value != default]
        if idle and self._options.is_fitting:
            self._fallbacks.tell(
                "No graph of a batch is cut, and none of its rows is stale",
                origin=f"what {' and '.join(idle)} say",
                to="micro-batches of whole graphs",
            )

    def chunks(self, graph: PlannedGraph, linear_scale: float) -> None:
        """Warn once if most edges lie between chunks, or a fixed order counts the same ones twice.

        Args:
            graph: The graph that is trained on.
            linear_scale: The factor on gradients between its chunks in linear layers.
        """
        if graph.cut_frac == 0 or not self._transport.world.is_root:
            return
        method, has_messages = self._options.histories.method, self._model.intercepted.has_messages
        factor = method.message_scale if has_messages else linear_scale
        if graph.cut_frac > DENSE and not self._has_warned_of_cut:
            self._has_warned_of_cut = True
            log.warning(
                "%s of all edges lie between chunks, so accuracy may suffer. Use fewer chunks, "
                "partition='metis' or graph_parallel, and compare with num_chunks=1.",
                f"{100 * graph.cut_frac:.0f} %",
            )
        is_fixed = self._options.chunk_order == "fixed"
        if is_fixed and factor != 1 and not self._has_warned_of_order:
            self._has_warned_of_order = True
            log.warning(
                "chunk_order='fixed' with a factor of %s on gradients of fresh rows: the same "
                "edges between chunks count more than once in every step. Use another order.",
                f"{factor:g}",
            )

    def rows(self, own: Histories, step: int, *, averages_weights: bool) -> None:
        """Warn once if stale rows should come from validation, and it has written none.

        Args:
            own: The histories of the step's input.
            step: The training pass that reads them.
            averages_weights: Whether validation may run with averages of weights.
        """
        if not own.takes_rows(step):
            return
        norms = self._model.intercepted.norms
        remedy = "Validate after every epoch, with the inputs of training."
        if norms:
            why = f"'{next(iter(norms))}' sees all nodes, otherwise in validation than in training"
            remedy = "This is how networks with such norms train by default."
        elif self._options.messages.is_async:
            why = "With async_halo shards do not wait for the rows of validation"
            remedy = "This is a part of asynchronous training."
        elif averages_weights:
            why = "Validation may run with averages of the weights"
            remedy = "staleness='constant' never takes rows of validation."
        elif own.was_renewed is False:
            why = "Validation is given other inputs than training, or other weights"
        else:
            why = "No validation has run just before a pipelined step"
        self._fallbacks.tell(
            why, origin="stale rows of validation", to="those of the last step", remedy=remedy
        )

    def graphs(self, call: Call, inputs: Inputs, graph_of_node: Tensor | None) -> None:
        """Tell once if a batch of several graphs is run as one graph."""
        if graph_of_node is not None and inputs.graphs is None and not call.has_graphs:
            self._fallbacks.tell(
                "Edges join graphs of the batch, or its nodes are not the module's",
                origin="micro-batches of whole graphs",
                to="chunks of one graph",
            )

    def new_reads(self) -> None:
        """Tell once that a step has to fill histories again in the middle of training."""
        self._fallbacks.tell(
            "The module runs in a way in which it has not run before",
            origin="pipelined steps",
            to="an exact step, which fills the histories",
        )

    def loss_of_rows(self) -> None:
        """Tell once that what the last step has left may not be read."""
        if any(own.filled and own.graph.plan.num_chunks > 1 for own in self._graphs.inputs):
            self._fallbacks.tell(
                "The last step failed midway, or its loss or gradients were not finite",
                origin="pipelined steps",
                to="an exact step, which fills the histories anew",
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
