"""Checks before training: refuse layers, chunks and hooks that would give wrong results.

A hook on a layer would run once per chunk, on the rank of its stage, and in the self-check. A hook
on the pipelined module itself runs once per call, on every rank, with all rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import hooked_parameters, hooks_in
from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.known_graphs import GraphCache, PlannedGraph
from lightning_gnnpipe.errors import ConfigError, Fallbacks, UnsupportedError
from lightning_gnnpipe.layers import (
    check_graph_batches,
    check_norms,
    check_replicas,
    check_support,
    uses_batch_statistics,
)
from lightning_gnnpipe.methods import is_one_graph
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.selfcheck import check_graphs, check_layers, norms_without_batch
from lightning_gnnpipe.stages import Layers
from lightning_gnnpipe.staleness import DENSE
from lightning_gnnpipe.steps import PipelinedModel

log = logging.getLogger(__name__)


class EngineChecks:
    """Checks and warnings of one engine, each made once."""

    def __init__(
        self,
        model: PipelinedModel,
        graphs: GraphCache,
        transport: Transport,
        options: RunOptions,
    ) -> None:
        self._model, self._graphs = model, graphs
        self._transport, self._options = transport, options
        is_alone = options.num_chunks == 1 and not transport.world.is_distributed
        may_recompute = options.given.recompute or options.given.memory_gib is not None
        self._is_whole = is_alone and not may_recompute
        self._checked: set[bool] = set()
        self._is_one: bool | None = None  # cached for all-zero batch vectors
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)

    def find_batch(self, call: Call, in_batch: Tensor | None) -> tuple[Call, Tensor | None]:
        """Return the call, and the batch vector of the user's `Batch` unless it is of one graph.

        A batch vector of zeros means one graph if the graph can be cut and outputs have one row per
        node. With a PyG `Batch` it does not: its loader may yield several graphs later.
        """
        if self._has_batches:
            return call, in_batch
        if in_batch is not None:
            return call, in_batch if int(in_batch[-1]) > 0 else None
        vector = call.batch_vector
        if vector is None or vector.any() or vector.numel() < self._options.num_chunks:
            return call, None
        if self._is_one is None:
            with self._model.staged.gathered():
                self._is_one = is_one_graph(self._model.module, call)
        return replace(call, is_one_graph=self._is_one), None

    @property
    def _has_batches(self) -> bool:
        """Whether all calls are batches: with replicas, or after a batch of several graphs."""
        return True in self._checked or self._transport.world.num_replicas > 1

    def support(self, has_graphs: bool) -> None:
        """Refuse layers that are wrong on chunks, or options that do not fit batches."""
        if has_graphs in self._checked:
            return
        mesh = self._transport.mesh
        if has_graphs:
            check_graph_batches(mesh.num_shards)
            if not isinstance(self._options.given.partition, str):
                raise ConfigError(
                    expected="'partition' to be left out for batches of graphs",
                    found="a tensor with the chunk of each node",
                    remedy="Micro-batches hold whole graphs. Set num_chunks instead.",
                )
            self._tell_of_idle()
        else:
            check_replicas(mesh.num_replicas)
            check_support(self._model.module, self._options.graph_chunks, mesh.num_shards)
        self._checked.add(has_graphs)

    def start(self, inputs: Inputs, *, is_training: bool) -> None:
        """Before the first trace: refuse more chunks than nodes, and say what takes time."""
        options = self._options
        is_measured = options.is_fitting and options.measures(options.num_stages + 1)
        if inputs.graphs is None and (is_training or is_measured):
            options.count_chunks(inputs.num_nodes)
        check = " and checking it" if options.given.self_check else ""
        self._model.say(f"Tracing the network{check} ...")

    def several_forwards(self, has_graphs: bool) -> None:
        """Refuse a second training pass before the backward of the first, where it cannot run."""
        if has_graphs or self._options.given.async_halo:
            raise UnsupportedError(
                expected="one pipelined forward before each backward, in batches of graphs and "
                "with async_halo=True",
                found="a second one in the same step",
                remedy="Call the module once per step, or the second time in torch.no_grad(). On "
                "one large graph, leave async_halo out.",
            )

    def hooks(self) -> None:
        """Refuse hooks on layers and weights that would run differently in a pipeline."""
        module = self._model.module
        place = next(_hooked_modules(module), None)
        if place is not None:
            raise UnsupportedError(
                expected="no hooks on layers of the pipelined module, which run once for each "
                "chunk",
                found=place,
                remedy="Return what the hook looks at from the forward of the pipelined module, or "
                "put the hook on that module itself: there it gets all rows.",
            )
        if not self._is_whole and (name := next(hooked_parameters(module), None)) is not None:
            raise UnsupportedError(
                expected="no hooks on weights of the pipelined module, whose gradients come "
                "chunk by chunk",
                found=f"one on '{name}'",
                remedy="Read or change the gradients in on_after_backward or "
                "on_before_optimizer_step, where p.grad is whole; "
                "gradient_clip_algorithm='value' clips each number.",
            )

    def _tell_of_idle(self) -> None:
        idle = self._options.given.of_chunks
        if idle and self._options.is_fitting:
            self._fallbacks.tell(
                "Without effect on batches of graphs, of which none is cut: %s.", ", ".join(idle)
            )

    def chunks(self, graph: PlannedGraph) -> None:
        """Warn once of mostly cut edges."""
        if graph.cut_frac > DENSE:
            self._fallbacks.tell(
                "%s of all edges lie between chunks, so accuracy may suffer. Use fewer chunks, "
                "partition='metis' or graph_parallel, and compare with num_chunks=1.",
                f"{100 * graph.cut_frac:.0f} %",
            )

    def graphs(self, call: Call, inputs: Inputs, graph_of_node: Tensor | None) -> None:
        """Warn once if a batch of several graphs runs as one graph."""
        if graph_of_node is not None and inputs.graphs is None and not call.has_graphs:
            self._fallbacks.tell(
                "The batch runs as one graph, cut into chunks, since edges connect its graphs, or "
                "the module's input has other nodes than the batch."
            )

    def new_reads(self) -> None:
        """Warn once that a step fills histories again in the middle of training."""
        self._fallbacks.tell(
            "A step runs exactly, to fill the histories, since the mode of the module (train or "
            "eval), frozen weights or options have changed."
        )

    def loss_of_rows(self) -> None:
        """Warn once that histories are dropped after a failed step."""
        known = self._graphs.inputs.kept.values()
        if any(own.filled and own.graph.plan.num_chunks > 1 for own in known):
            self._fallbacks.tell(
                "A step runs exactly, to fill the histories anew, since the last one failed "
                "midway, or its outputs or gradients were not finite."
            )

    def layers(self, layers: Layers, call: Call, inputs: Inputs) -> None:
        """Refuse new layers whose results change on chunks."""
        module, options = self._model.module, self._options
        trains = options.is_fitting and (module.training or torch.is_grad_enabled())
        if inputs.graphs is not None:
            self._layers_of_batches(layers, call, inputs, trains=trains)
            return
        if options.given.self_check:
            is_cut = self._graphs.is_cut(inputs)
            grads = trains if is_cut else torch.is_grad_enabled()  # for which forward may ask
            check_layers(module, layers, call, inputs, on_chunks=is_cut, with_gradients=grads)

    def _layers_of_batches(
        self, layers: Layers, call: Call, inputs: Inputs, *, trains: bool
    ) -> None:
        """Raise `UnsupportedError` if micro-batches would change the results of the module."""
        module, options = self._model.module, self._options
        in_parts = options.most_parts > 1
        if in_parts:
            check_norms(module, norms_without_batch(layers))
            norms = self._model.intercepted.batch_norms
            used = [name for name, norm in norms.items() if uses_batch_statistics(norm)]
            if used:
                self._fallbacks.tell(
                    "BatchNorm ('%s') takes the statistics of each micro-batch of graphs, as of "
                    "each replica in DDP. Running statistics are updated once per step, from all "
                    "graphs.",
                    used[0],
                )
        if options.given.self_check:
            check_graphs(module, layers, call, inputs, in_parts=in_parts, with_gradients=trains)


# Hooks of libraries only prepare weights, or record names and times.
_LIBRARIES = ("torch.", "torch_geometric.", "lightning.", "pytorch_lightning.")


def _hooked_modules(module: nn.Module) -> Iterator[str]:
    for name, one in module.named_modules():
        if one is not module and any(map(_is_users, hooks_in(one))):
            yield f"one on '{name}', a {type(one).__name__}"
    if any(map(_is_users, hooks_in(nn.modules.module))):
        yield "one on all modules"


def _is_users(hook: Any) -> bool:
    """Whether the user wrote `hook`."""
    while isinstance(hook, partial):
        hook = hook.func
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{origin}.".startswith(_LIBRARIES)
