"""Builds the passes over one graph, or over a mini-batch of graphs.

    one graph          chunks, with the histories of its input; exact: the whole graph at once
    batch of graphs    -> graphs, by work -> micro-batches -> the stages, in turn -> rows put back

Batches differ from step to step, so that they have neither histories nor a cached plan.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks import (
    BatchInputs,
    CapturedChunks,
    ExactStep,
    PassInputs,
    PassSpec,
    PlannedInputs,
    SeedOf,
    Step,
    StepCosts,
    can_capture,
    exact_context,
    measure_costs,
    own_random_stream,
    return_freed_memory,
    threads_of_stage,
)
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.identity import InputKey
from lightning_gnnpipe.engine.known_graphs import GraphCache, Histories, PlannedGraph
from lightning_gnnpipe.engine.resume import InputState, take_histories, warn_of_mismatch
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.errors import Fallbacks
from lightning_gnnpipe.graph import BatchPlan, ChunkPlan, chunk_order, plan_micro_batches
from lightning_gnnpipe.layers import (
    NativeContext,
    intercept,
    tracks_statistics,
    uses_batch_statistics,
)
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.passing import GraphEdges, Masks, MessageContext
from lightning_gnnpipe.stages import Layers, switched
from lightning_gnnpipe.staleness import HostCopies
from lightning_gnnpipe.steps import Controls, Mode, PassSeeds, PipelinedModel

log = logging.getLogger(__name__)


class Passes:
    """Prepares passes."""

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
        given, exact = options.given, get_codecs("fp32")
        # By whether the pass is exact; exact passes send fp32.
        self._halo_codecs = {False: get_codecs(given.halo_codec), True: exact}
        self._cut_codecs = {False: get_codecs(given.cut_codec), True: exact}
        sent = self._halo_codecs[False], self._cut_codecs[False]
        self.sends_exactly = not given.async_halo and all(one.is_exact for one in sent)
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)
        self._has_met_several = False  # graphs in a batch
        is_on_host = transport.world.device.type == "cpu"
        self._saves_memory = options.given.saves_memory and is_on_host
        self._has_budget = options.given.memory_gib is not None and is_on_host

    def mode(self, call: Call, inputs: Inputs, key: InputKey | None) -> Mode:
        """Return the stages for these arguments, traced if new; `key`: None for several graphs."""

        def measure(layers: Layers) -> StepCosts:
            cut: GraphEdges | BatchPlan | int
            stored = None
            if key is None:
                cut = self._plan_batch(inputs)
            else:
                cut = self._graphs.cut_to_measure(key.graph, inputs)
                stored = self._graphs.find_stored(key.graph, inputs)
            module, histories = self._model.module, self._graphs.histories
            given = self._options.given
            is_tight = given.memory_gib is not None or given.exact_in_chunks
            found = measure_costs(
                module,
                layers,
                cut,
                call,
                inputs,
                histories,
                is_tight=is_tight,
                mapped=None if stored is None else stored.places,
                shares_cores=self._transport.has_others and given.graph_parallel == 1,
            )
            if is_tight:
                gc.collect()  # layers hold the matrices and plans of the measurement
            return found

        return self._model.mode(call, inputs, measure, also_train=self._options.is_fitting)

    def needs_no_history(self, graph: PlannedGraph) -> bool:
        """Whether there are several chunks and none reads rows of another, or of earlier steps."""
        plan, layers = graph.plan, self._model.intercepted
        is_apart = plan.is_disjoint and not layers.norms
        return plan.num_chunks > 1 and (is_apart or self._options.trains_exactly)

    def refresh(self, call: Call, inputs: Inputs, own: Histories, key: InputKey) -> None:
        """Recompute the histories of an input by an exact pass without dropout."""
        model = self._model
        norms = model.intercepted.norms
        if norms:
            self._fallbacks.tell(
                "EmbeddingRefresh runs one more forward pass before each epoch that it renews, "
                "since '%s' normalises over all nodes. Leave it out, unless the loss jumps.",
                min(norms),
            )
        with switched(model.module, False, but=norms.values()), torch.no_grad():
            has_changed = [model.has_changed(call, inputs)]
            model.is_due = max(self._transport.meet("refresh embeddings", has_changed))[0] > 0
            mode = self.mode(call, inputs, key)
            own.inputs.load(call, inputs, key.leaves)
            own.writing.is_refresh = True
            try:
                self.run_exact(self.over_graph(mode, own.graph, own.writing, own.inputs))
            finally:
                own.writing.is_refresh = False
        own.renew()

    def take_saved(self, own: Histories, number: int, mode: Mode, *, is_resumed: bool) -> None:
        """Load saved histories into `own`; the first step of a resumed run warns of mismatches."""
        known, mesh = self._graphs.inputs, self._transport.mesh
        saved = known.saved.pop(number, None)
        if known.num_saved_layers != sum(len(stage.segments) for stage in mode.stages):
            saved = None
        if saved is not None:
            take_histories(saved, own, [one.index for one in mode.stages[mesh.stage].segments])
        if is_resumed and not mesh.rank:
            warn_of_mismatch(saved, own, known.lack)

    def training(self, mode: Mode, own: Histories, *, is_exact: bool) -> PassSpec:
        """Begin a training pass over one graph; it writes histories only if a later read may be."""
        graph = own.graph
        is_shared = self._options.given.recompute and graph.plan.shard is not None
        has_stale = graph.plan.num_chunks > 1 or self._options.given.async_halo
        is_written = is_shared or (has_stale and not self.needs_no_history(graph))
        context = own.writing if is_written else graph.reading
        spec = self.over_graph(
            mode, graph, context, own.inputs, is_exact=is_exact, is_training=True
        )
        is_alone = self._transport.mesh.num_stages == 1 or graph.plan.num_chunks == 1
        context.masks = None if is_exact or is_alone else self._masks(own, spec)
        device = self._transport.world.device
        if not self._options.given.cuda_graphs:
            return spec
        place = "one chunk" if graph.plan.num_chunks == 1 else str(device)
        if place == "one chunk" or not can_capture(device):
            self._fallbacks.tell("cuda_graphs=True has no effect on %s.", place)
        elif is_written and not is_exact:
            own.captured = own.captured or CapturedChunks(device, self._fallbacks)
            return replace(spec, captured=own.captured)
        return spec

    def _masks(self, own: Histories, spec: PassSpec) -> Masks | None:
        """Return what draws masks of dropout while this rank waits; None where memory is short."""
        is_tight = spec.recompute or self._saves_memory or self._has_budget
        is_captured = self._options.given.cuda_graphs
        if is_tight or is_captured or self._transport.world.device.type != "cpu":
            return None
        segments = [one.index for one in spec.stage.computed]

        def draws(order: Sequence[int], seed_of: SeedOf) -> list[tuple[tuple[int, int], int]]:
            places = [(segment, chunk) for chunk in order for segment in segments]
            return [(place, seed_of(*place)) for place in places]

        assert spec.seed_of is not None
        step = self._seeds.step_index + 1
        order = chunk_order(spec.plan.num_chunks, epoch=step, seed=self._options.seed)
        later = draws(order, self._seeds.of_step(step))
        has_others = len(self._graphs.inputs.kept) > 1  # whose turn the next step may be
        own.masks.begin_step(draws(spec.order, spec.seed_of), [] if has_others else later)
        return own.masks

    def over_graph(
        self,
        mode: Mode,
        graph: PlannedGraph,
        context: MessageContext,
        inputs: PlannedInputs,
        *,
        is_exact: bool = True,
        is_training: bool = False,
    ) -> PassSpec:
        """Begin a pass over one graph, with the exchange of shards.

        It writes histories if `context` has a store.
        """
        if isinstance(context.store, SharedStore):
            is_synchronous = is_exact or self._controls.is_synchronous
            is_async = self._options.given.async_halo
            context.store.begin_pass(
                self._halo_codecs[is_exact], is_async=is_async, is_synchronous=is_synchronous
            )
        by_layer = is_exact and self._options.given.exact_in_chunks and graph.plan.num_chunks > 1
        if is_exact and self._has_budget and graph.plan.num_chunks > 1 and not by_layer:
            return_freed_memory()  # small pieces, of chunks, before one large piece for all nodes
        plan = graph.plan.whole if is_exact and not by_layer else graph.plan
        seed = self._options.seed
        order = chunk_order(plan.num_chunks, epoch=self._seeds.step_index, seed=seed)
        if by_layer:
            copies = HostCopies(None, self._options.given.histories.folder, graph.free_tables)
            context = exact_context(plan, context, copies)
        spec = self._spec(mode, plan, order, inputs, context, is_exact, is_training)
        spec = replace(spec, by_layer=True, recompute=True) if by_layer else spec
        is_on_host = self._transport.world.device.type == "cpu"
        if is_on_host and (by_layer or plan.num_chunks == 1):  # stages take turns
            spec = replace(spec, num_threads=threads_of_stage(self._transport.mesh.num_shards))
        return spec

    def over_batch(
        self, mode: Mode, call: Call, inputs: Inputs, *, is_exact: bool, is_training: bool
    ) -> PassSpec:
        """Begin a pass over a batch of graphs; exact: its messages are not rounded."""
        plan = self._plan_batch(inputs)
        order, context = range(plan.num_chunks), NativeContext(plan.num_chunks)
        of_batch = BatchInputs(call, inputs, plan)
        return self._spec(mode, plan, order, of_batch, context, is_exact, is_training)

    def _spec(
        self,
        mode: Mode,
        plan: ChunkPlan | BatchPlan,
        order: Sequence[int],
        inputs: PassInputs,
        context: MessageContext | NativeContext,
        is_exact: bool,
        is_training: bool,
    ) -> PassSpec:
        return PassSpec(
            stage=mode.stages[self._transport.mesh.stage],
            outputs=tuple(map(mode.layers.values.__getitem__, mode.layers.outputs)),
            plan=plan,
            order=order,
            inputs=inputs,
            context=context,
            transport=self._transport,
            seed_of=self._seeds.of_training() if is_training else None,
            is_training=is_training,
            recompute=self._options.given.recompute,
            codecs=self._cut_codecs[is_exact],
            saves_memory=self._saves_memory,
        )

    def run_exact(self, spec: PassSpec) -> tuple[list[Tensor], bool]:
        """Return the outputs of a pass without gradients, each `[num_rows, *]`, on every rank.

        Also returns whether this rank's layers have drawn random numbers.
        """
        with (
            self._transport.meter.paused(),
            intercept(self._model.intercepted, spec.context),
            own_random_stream(self._transport.world.device) as has_drawn,
            spec.computing(),
            torch.no_grad(),
        ):
            return (ExactStep if spec.by_layer else Step)(spec).forward(), has_drawn()

    def _plan_batch(self, inputs: Inputs) -> BatchPlan:
        """Return `num_chunks` micro-batches, or one per graph with nodes if there are fewer."""
        assert inputs.graphs is not None
        num_chunks = self._options.most_parts
        norms = self._model.intercepted.batch_norms.values()
        least = 2 if any(map(uses_batch_statistics, norms)) else 1  # rows of graphs, for their mean
        plan = plan_micro_batches(inputs.graphs.work(), inputs.graphs.sizes, num_chunks, least)
        self._has_met_several |= inputs.graphs.num_graphs > 1
        if num_chunks > 1 and not self._has_met_several:
            self._fallbacks.tell(
                "A batch of graphs holds one graph: it runs in one micro-batch, which overlaps "
                "with nothing. If it is your only graph, serve it by DataLoader([data], "
                "batch_size=None)."
            )
        elif plan.num_chunks < num_chunks and self._options.given.num_chunks != "auto":
            self._fallbacks.tell(
                "A batch of %s graphs runs in %s micro-batches, not num_chunks=%s.",
                inputs.graphs.num_graphs,
                plan.num_chunks,
                num_chunks,
            )
        return plan

    def can_renew(self, own: Histories) -> bool:
        """Whether a pass without gradients may write the histories: `EmbeddingRefresh` asks for it.

        Not with norms over all nodes, whose statistics differ in training, nor with asynchronous
        shards, where it would receive rows that are still in flight.
        """
        is_asked = self._controls.takes_validation and not self.needs_no_history(own.graph)
        if not is_asked or own.is_renewed:
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


class RunningStatistics:
    """Running statistics from pipelined steps, and their replacement in validation.

    In a pipelined step a norm sees embeddings of stale inputs. In a deep network they differ
    from exact embeddings, and the running statistics do not fit. So the next validation
    on the training input recomputes the statistics. `stale` has the names of such norms; it is
    equal on all ranks.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self.stale: set[str] = set()
        self._fallbacks = Fallbacks(log, is_quiet=is_quiet)

    def note_pipelined(self, norms: Mapping[str, nn.Module]) -> None:
        self.stale |= {name for name, norm in norms.items() if tracks_statistics(norm)}

    @contextmanager
    def replaced(self, graph: PlannedGraph, layers: Layers) -> Iterator[None]:
        """Let one exact pass over `graph`, within the block, replace the statistics.

        A norm that is called several times in a pass has several statistics, so it is skipped.
        """
        names = {name for name in self.stale if layers.num_calls(name) == 1}
        graph.reading.replaced = names
        try:
            yield
        finally:
            graph.reading.replaced = ()
        self.stale -= names

    def warn(self) -> None:
        """Warn once if validation has not replaced some statistics."""
        if self.stale:
            self._fallbacks.tell(
                "The running statistics of '%s' and other norms come from pipelined steps, and no "
                "validation has recomputed them from exact embeddings. A deep network may evaluate "
                "much worse than it trains. Let fit() validate after its last epoch, with the "
                "inputs of training, without weight averaging, and with one call of each norm.",
                min(self.stale),
            )
