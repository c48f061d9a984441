"""Builds the passes over one graph: training in chunks, exact training, and inference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks import (
    PassSpec,
    PlannedInputs,
    Step,
    StepCosts,
    measure_layers,
    own_random_stream,
)
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.histories import Histories, PlannedGraph
from lightning_gnnpipe.engine.identity import InputKey
from lightning_gnnpipe.engine.known_graphs import GraphCache
from lightning_gnnpipe.engine.resume import InputState, take_histories, warn_of_mismatch
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.layers import intercept
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.stages import Layers, switched
from lightning_gnnpipe.steps import Controls, Mode, PassSeeds, PipelinedModel


class GraphPasses:
    """Prepares passes over one graph."""

    def __init__(
        self,
        model: PipelinedModel,
        graphs: GraphCache,
        transport: Transport,
        options: RunOptions,
        controls: Controls,
        seeds: PassSeeds,
    ) -> None:
        self._model, self._graphs, self._transport = model, graphs, transport
        self._options, self._controls, self._seeds = options, controls, seeds
        messages = options.given.messages
        exact = replace(messages, halo_codec="fp32", cut_codec="fp32")
        # By whether the pass is exact; exact passes send fp32.
        self._messages = {False: messages, True: exact}
        self.cut_codecs = {key: get_codecs(one.cut_codec) for key, one in self._messages.items()}
        self.sends_exactly = messages.is_exact

    def mode(self, call: Call, inputs: Inputs, fingerprint: int) -> Mode:
        """Return the stages for these arguments, traced if new; `fingerprint`: of the edges."""

        def measure(layers: Layers) -> StepCosts:
            plan = self._graphs.plan_to_measure(fingerprint, inputs)
            histories = self._graphs.histories
            return measure_layers(self._model.module, layers, plan, call, inputs, histories)

        return self._model.mode(call, inputs, measure, also_train=self._options.is_fitting)

    def needs_no_history(self, graph: PlannedGraph) -> bool:
        """Whether there are several chunks and none reads rows of another."""
        plan, layers = graph.plan, self._model.intercepted
        return plan.num_chunks > 1 and plan.is_disjoint and not layers.sees_all_nodes

    def refresh(self, call: Call, inputs: Inputs, own: Histories, key: InputKey) -> None:
        """Recompute the histories of an input by an exact pass without dropout."""
        model = self._model
        norms = model.intercepted.norms.values()
        with switched(model.module, False, but=norms), torch.no_grad():
            has_changed = [model.has_changed(call, inputs)]
            model.is_due = max(self._transport.meet("refresh embeddings", has_changed))[0] > 0
            mode = self.mode(call, inputs, key.graph)
            own.inputs.load(call, inputs, key.leaves)
            own.writing.is_refresh = True
            try:
                self.run_exact(mode, own.graph, own.writing, own.inputs)
            finally:
                own.writing.is_refresh = False
        own.renew()

    def take_saved(self, own: Histories, number: int, mode: Mode, *, is_resumed: bool) -> None:
        """Load saved histories into `own`; the first step of a resumed run warns of mismatches."""
        known, mesh = self._graphs.inputs, self._transport.mesh
        saved = known.saved.pop(number, None)
        has_taken = take_histories(saved, own, mode, mesh, known.num_saved_layers)
        if is_resumed and not mesh.rank:
            warn_of_mismatch(saved if has_taken else None, own)

    def open_training(self, mode: Mode, own: Histories, *, is_exact: bool) -> PassSpec:
        """Begin a training pass: draw its seeds and open the exchange of shards."""
        graph = own.graph
        # Write histories only if a later read is possible.
        is_shared = self._options.given.recompute and graph.plan.shard is not None
        has_stale = graph.plan.num_chunks > 1 or self._options.given.async_halo
        is_written = is_shared or (has_stale and not self.needs_no_history(graph))
        context = own.writing if is_written else graph.reading
        return self._open(mode, graph, context, own.inputs, is_exact=is_exact, is_training=True)

    def run_exact(
        self, mode: Mode, graph: PlannedGraph, context: MessageContext, inputs: PlannedInputs
    ) -> tuple[list[Tensor], bool]:
        """Return the outputs of an exact pass without gradients, each `[num_rows, *]`.

        They are on every rank. Also returns whether this rank's layers have drawn random numbers.
        The pass writes histories if `context` has a store.
        """
        spec = self._open(mode, graph, context, inputs, is_exact=True, is_training=False)
        with (
            intercept(self._model.intercepted, context),
            own_random_stream(self._transport.world.device) as has_drawn,
            torch.no_grad(),
        ):
            return Step(spec).forward(), has_drawn()

    def _open(
        self,
        mode: Mode,
        graph: PlannedGraph,
        context: MessageContext,
        inputs: PlannedInputs,
        *,
        is_exact: bool,
        is_training: bool,
    ) -> PassSpec:
        if isinstance(context.store, SharedStore):
            is_synchronous = is_exact or self._controls.is_synchronous
            context.store.begin_pass(self._messages[is_exact], is_synchronous=is_synchronous)
        plan = graph.plan.whole if is_exact else graph.plan
        step, seed = self._seeds.step_index, self._options.seed
        return PassSpec(
            stage=mode.stages[self._transport.mesh.stage],
            outputs=tuple(mode.layers.values[name] for name in mode.layers.outputs),
            plan=plan,
            order=chunk_order(plan.num_chunks, epoch=step, seed=seed),
            inputs=inputs,
            context=context,
            transport=self._transport,
            seed_of=self._seeds.of_training() if is_training else None,
            is_training=is_training,
            recompute=self._options.given.recompute,
            codecs=self.cut_codecs[is_exact],
        )

    def can_renew(self, own: Histories) -> bool:
        """Whether a pass without gradients may write the histories: `EmbeddingRefresh` asks for it.

        Not with norms over all nodes, whose statistics differ in training, nor with asynchronous
        shards, where it would receive rows that are still in flight.
        """
        if not self._controls.takes_validation or own.is_renewed:
            return False
        return not self._options.given.async_halo and not self._model.intercepted.norms

    def trained_alike(self, key: InputKey, mode: Mode, graph: PlannedGraph) -> Histories | None:
        """Return the histories if training had the same input and frozen weights, else None."""
        if not self._options.is_fitting or self._model.module.training:
            return None
        own = self._graphs.inputs.kept.get(key.number)
        if own is None or own.graph is not graph or own.last_step < 0:
            return None
        return own if own.frozen == mode.frozen else None

    def input_states(self) -> tuple[InputState, ...]:
        """Return the checkpointed state of each input with histories, without rows."""
        states = [one.state for one in self._graphs.inputs.saved.values()]
        for number, own in self.kept_inputs().items():
            flags = own.is_renewed, own.is_refresh_due
            states.append(InputState(number, tuple(own.filled), own.last_step, *flags))
        return tuple(sorted(states, key=lambda one: one.last_step))

    def kept_inputs(self) -> dict[int, Histories]:
        """Return the histories that are read, by input number."""
        kept = self._graphs.inputs.kept.items()
        read = {number: own for number, own in kept if own.graph.plan.num_chunks > 1}
        return {n: own for n, own in read.items() if not self.needs_no_history(own.graph)}
