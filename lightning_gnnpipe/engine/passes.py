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
from lightning_gnnpipe.codecs import Codecs, get_codecs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.histories import Histories, PlannedGraph, RowState
from lightning_gnnpipe.engine.identity import InputKey
from lightning_gnnpipe.engine.known_graphs import GraphCache
from lightning_gnnpipe.engine.resume import (
    InputState,
    take_histories,
    tell_of_exact_step,
    warn_of_method,
)
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.layers import intercept
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.schedule import add_transfers, fill_drain
from lightning_gnnpipe.stages import Layers, switched
from lightning_gnnpipe.steps import (
    Controls,
    EngineOptions,
    Measure,
    Mode,
    PassSeeds,
    PipelinedModel,
)


class GraphPasses:
    """Prepares passes over one graph."""

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
        messages = options.messages
        exact = replace(messages, halo_codec="fp32", cut_codec="fp32")
        self._messages = {False: messages, True: exact}  # by whether the pass is exact
        self._cut_codecs = {key: get_codecs(one.cut_codec) for key, one in self._messages.items()}
        self.sends_exactly = messages.is_exact

    def mode(self, call: Call, inputs: Inputs, fingerprint: int) -> Mode:
        """Return the stages for these arguments, traced if they are new.

        `fingerprint` is that of the edges.
        """
        measure = self._measurer(call, inputs, fingerprint)
        return self._model.mode(call, inputs, measure, also_train=self._options.is_fitting)

    def needs_no_history(self, graph: PlannedGraph) -> bool:
        """Whether there are several chunks and none reads rows of another."""
        plan, layers = graph.plan, self._model.intercepted
        return plan.num_chunks > 1 and plan.is_disjoint and not layers.sees_all_nodes

    def refresh(self, call: Call, inputs: Inputs, own: Histories, key: InputKey) -> None:
        """Recompute the histories of an input by an exact pass without dropout."""
        norms = self._model.intercepted.norms.values()
        with switched(self._model.module, False, but=norms), torch.no_grad():
            mode = self.mode(call, inputs, key.graph)
            own.inputs.load(call, inputs, key.leaves)
            own.writing.is_refresh = True
            try:
                spec = self.open_exact(mode, own.graph, own.writing)
                run_exact(replace(spec, inputs=own.inputs), self._model)
            finally:
                own.writing.is_refresh = False
        own.renew()

    def take_saved(self, own: Histories, number: int, mode: Mode, *, is_resumed: bool) -> None:
        """Load saved histories into `own`; the first step of a resumed run warns of mismatches."""
        saved = self._graphs.inputs.saved.pop(number, None)
        num_layers = self._graphs.inputs.num_saved_layers
        has_taken = take_histories(saved, own, mode, self._transport.mesh, num_layers)
        if not is_resumed or self._transport.mesh.rank:
            return
        if saved is not None and has_taken:
            warn_of_method(saved, own)
        elif own.graph.plan.num_chunks > 1:
            tell_of_exact_step()

    def _measurer(self, call: Call, inputs: Inputs, fingerprint: int) -> Measure:
        def measure(layers: Layers) -> StepCosts:
            plan = self._graphs.plan_to_measure(fingerprint, inputs)
            planned = PlannedInputs(plan)
            planned.load(call, inputs)
            histories = self._graphs.histories
            return measure_layers(self._model.module, layers, plan, planned, histories)

        return measure

    def open_training(self, mode: Mode, own: Histories, *, is_exact: bool) -> PassSpec:
        """Begin a training pass: draw its seeds and open the exchange of shards."""
        graph = own.graph
        # Write histories only if a later read is possible.
        is_shared = self._options.histories.recomputes and graph.plan.shard is not None
        has_stale = graph.plan.num_chunks > 1 or self._options.messages.is_async
        is_written = is_shared or (has_stale and own.is_kept and not self.needs_no_history(graph))
        context = own.writing if is_written else graph.reading
        spec = self._open(mode, graph, context, is_exact=is_exact, is_training=True)
        return replace(spec, inputs=own.inputs)

    def open_exact(self, mode: Mode, graph: PlannedGraph, context: MessageContext) -> PassSpec:
        """Begin an exact pass without gradients, likewise."""
        return self._open(mode, graph, context, is_exact=True, is_training=False)

    def _open(
        self,
        mode: Mode,
        graph: PlannedGraph,
        context: MessageContext,
        *,
        is_exact: bool,
        is_training: bool,
    ) -> PassSpec:
        if isinstance(context.store, SharedStore):
            is_synchronous = is_exact or self._controls.is_synchronous
            context.store.begin_pass(self._messages[is_exact], is_synchronous=is_synchronous)
        return PassSpec(
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
            codecs=self._cut_codecs[is_exact],
        )

    def validation_renews(self, own: Histories) -> bool:
        """Whether the next validation is expected to renew the histories."""
        if own.was_renewed is not None:
            return own.was_renewed
        return not self._model.intercepted.norms and not self._options.messages.is_async

    def can_renew(self, own: Histories, step: int) -> bool:
        """Whether a pass without gradients may write the rows of training pass `step`.

        Never with asynchronous shards: the pass would receive rows that are still in flight.
        """
        takes = own.takes_rows(step, is_asked=self._controls.takes_validation)
        return takes and not self._options.messages.is_async and not self._model.intercepted.norms

    def trained_alike(self, key: InputKey, mode: Mode, graph: PlannedGraph) -> Histories | None:
        """Return the histories if training had the same input and frozen weights, else None."""
        if not self._options.is_fitting or self._model.module.training:
            return None
        own = self._graphs.inputs.get(key.number)
        if own is None or own.graph is not graph or own.last_step < 0:
            return None
        return own if own.frozen == mode.frozen else None

    def order(self, spec: PassSpec, step: int) -> tuple[int, ...]:
        """Return the chunk order of training step `step`."""
        return chunk_order(
            spec.plan.num_chunks,
            epoch=step,
            seed=self._options.seed,
            order=self._options.chunk_order,
        )

    def cut_codecs(self, is_exact: bool) -> Codecs:
        """Return the codecs between stages; exact passes send fp32."""
        return self._cut_codecs[is_exact]

    def input_states(self, *, is_validation_next: bool) -> tuple[InputState, ...]:
        """Return the checkpointed state of each input with histories, without rows."""
        saved = [one.state for one in self._graphs.inputs.saved.values()]
        states = [
            InputState(
                number,
                tuple(own.filled),
                own.last_step,
                is_validation_next and self.validation_renews(own),
                own.state is RowState.REFRESH_DUE,
            )
            for number, own in self.kept_inputs()
        ]
        return tuple(sorted((*saved, *states), key=lambda one: one.number))

    def kept_inputs(self) -> list[tuple[int, Histories]]:
        """Return the inputs whose histories are read, with their numbers."""
        kept = self._graphs.inputs.items()
        read = [(n, own) for n, own in kept if own.graph.plan.num_chunks > 1]
        return [(n, own) for n, own in read if not self.needs_no_history(own.graph)]


def run_exact(spec: PassSpec, model: PipelinedModel) -> list[Tensor]:
    """Run an exact pass; return the outputs, each `[num_rows, *]`, on every rank.

    `spec` has the one-chunk plan; its context writes histories if it has a store.
    """
    mesh, device = spec.transport.mesh, spec.transport.world.device
    order = tuple(range(spec.plan.num_chunks))
    num_virtual = len(spec.stages)
    schedule = add_transfers(
        fill_drain(spec.num_stages, order, backward=False, num_virtual=num_virtual)
    )
    with (
        intercept(model.intercepted, spec.context),
        own_random_stream(device),
        torch.no_grad(),
    ):
        return Step(spec).forward(schedule.forward(mesh.stage))
