"""Passes over one graph, whole or in chunks: what they are made of.

the user's batch -> the graph, known or planned anew -> chunks, histories -> a pass
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_gnnpipe.comm import MessageOptions, Transport, get_codecs
from lightning_gnnpipe.controls import Controls
from lightning_gnnpipe.engine.costs import measure_layers
from lightning_gnnpipe.engine.graph import GraphCache, PlannedGraph
from lightning_gnnpipe.engine.infer import run_exact
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.mode import Mode
from lightning_gnnpipe.engine.model import Measure, PipelinedModel
from lightning_gnnpipe.engine.options import EngineOptions
from lightning_gnnpipe.engine.seeds import PassSeeds
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.engine.step_costs import StepCosts
from lightning_gnnpipe.engine.step_parts import StepParts
from lightning_gnnpipe.engine.switch import switched
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.stages import Call, Inputs, Layers


class GraphPasses:
    """Prepares passes over a graph.

    Args:
        model: The pipelined model.
        graphs: The graphs that are known.
        transport: The ranks.
        options: See `EngineOptions`.
        controls: The switches.
        seeds: Of the passes.
    """

    def __init__(
        self,
        model: PipelinedModel,
        graphs: GraphCache,
        transport: Transport,
        options: EngineOptions,
        controls: Controls,
        seeds: PassSeeds,
    ) -> None:
        self._model, self._graphs, self._transport = model, graphs, transport
        self._options, self._controls, self._seeds = options, controls, seeds

    def mode(self, call: Call, inputs: Inputs, graph: PlannedGraph) -> Mode:
        """Return the stages for these arguments."""
        measure = self._measurer(call, inputs, graph)
        return self._model.mode(call, inputs, measure, also_train=self._options.is_fitting)

    def is_free(self, graph: PlannedGraph) -> bool:
        """Whether chunks are trained without histories: there are several, and none sees others."""
        plan, layers = graph.plan, self._model.intercepted
        return plan.num_chunks > 1 and plan.is_disjoint and not layers.sees_all_nodes

    def refresh(self, call: Call, inputs: Inputs, graph: PlannedGraph) -> None:
        """Recompute all histories by an exact pass with dropout off."""
        norms = self._model.intercepted.norms.values()
        with switched(self._model.module, False, but=norms), torch.no_grad():
            mode = self.mode(call, inputs, graph)
            graph.inputs.load(call, inputs)
            parts = self.parts(mode, graph, is_exact=True, is_training=False, writes=True)
            graph.writing.is_refresh = True
            try:
                run_exact(parts, self._model)
            finally:
                graph.writing.is_refresh = False
        graph.renew()

    def _measurer(self, call: Call, inputs: Inputs, graph: PlannedGraph) -> Measure:
        def measure(layers: Layers) -> StepCosts:
            plan = self._graphs.plan_to_measure(graph, inputs)
            planned = PlannedInputs(plan)
            planned.load(call, inputs)
            histories = self._graphs.histories
            return measure_layers(self._model.module, layers, plan, planned, histories)

        return measure

    def parts(
        self,
        mode: Mode,
        graph: PlannedGraph,
        *,
        is_exact: bool,
        is_training: bool,
        writes: bool = False,
    ) -> StepParts:
        """Return what a pass is made of.

        Args:
            mode: The stages.
            graph: The graph, its batch loaded.
            is_exact: Whether it runs as one chunk, and nothing is rounded.
            is_training: Whether a backward pass follows.
            writes: Whether histories are written, even without one.
        """
        messages = self.messages(is_exact)
        # Otherwise histories would never be read.
        is_shared = self._options.histories.recomputes and graph.plan.shard is not None
        has_stale = graph.plan.num_chunks > 1 or self._options.messages.is_async or is_shared
        is_written = (is_training or writes) and has_stale and not self.is_free(graph)
        context = graph.writing if is_written else graph.reading
        if isinstance(context.store, SharedStore):
            is_synchronous = is_exact or self._controls.is_synchronous
            context.store.begin_pass(messages, is_synchronous=is_synchronous)
        return StepParts(
            stages=mode.on_rank(self._transport.mesh),
            num_stages=len(mode.stages),
            outputs=tuple(mode.layers.values[name] for name in mode.layers.outputs),
            plan=graph.plan.whole if is_exact else graph.plan,
            inputs=graph.inputs,
            context=context,
            transport=self._transport,
            seed_of=self._seeds.of_training() if is_training else self._seeds.of_inference(),
            is_training=is_training,
            recompute=self._options.histories.recomputes,
            codecs=get_codecs(messages.cut_codec),
        )

    def validation_renews(self, graph: PlannedGraph) -> bool:
        """Whether the next validation will write the rows of training, as far as is known."""
        if graph.was_renewed is not None:
            return graph.was_renewed
        return not self._model.intercepted.norms and not self._options.messages.is_async

    def can_renew(self, graph: PlannedGraph, call: Call, step: int) -> bool:
        """Whether a pass without gradients may write the rows that training pass `step` reads.

        Where shards do not wait for each other it would take what is on its way: none does.
        """
        takes = graph.takes_rows(step, is_asked=self._controls.takes_validation)
        if not takes or self._options.messages.is_async or self._model.intercepted.norms:
            return False
        return self.is_alike(graph, call)

    def is_alike(self, graph: PlannedGraph, call: Call) -> bool:
        """Whether a pass in evaluation mode is given what the last training step was given."""
        module, trained = self._model.module, graph.trained_with
        if not self._options.is_fitting or module.training or graph is not self._graphs.trained:
            return False
        return trained is not None and trained.is_like(call, module)

    def order(self, parts: StepParts, step: int) -> tuple[int, ...]:
        """Return the chunks in the order of training step number `step`."""
        return chunk_order(
            parts.plan.num_chunks,
            epoch=step,
            seed=self._options.seed,
            order=self._options.chunk_order,
        )

    def messages(self, is_exact: bool) -> MessageOptions:
        """Return how messages of a pass are sent."""
        messages = self._options.messages
        return replace(messages, halo_codec="fp32", cut_codec="fp32") if is_exact else messages
