"""The pipeline engine: what the pipelined module's forward does under the strategy.

forward, with gradients  ->  training pass: exact or pipelined, histories written, then backward
forward, without         ->  exact pass, histories untouched, or renewed if that is due

A batch of many graphs runs in micro-batches of whole graphs, both times exactly: see `batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport, get_codecs
from lightning_gnnpipe.controls import Controls
from lightning_gnnpipe.engine.agree import Progress, agree
from lightning_gnnpipe.engine.autograd import join
from lightning_gnnpipe.engine.batch_schedules import check_schedule
from lightning_gnnpipe.engine.batches import BatchPasses
from lightning_gnnpipe.engine.checks import EngineChecks
from lightning_gnnpipe.engine.gradients import average_replicated
from lightning_gnnpipe.engine.graph import GraphCache
from lightning_gnnpipe.engine.graph_passes import GraphPasses
from lightning_gnnpipe.engine.identity import GraphIdentity
from lightning_gnnpipe.engine.infer import run_exact
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.last_step import LastStep
from lightning_gnnpipe.engine.loss_guard import LossGuard
from lightning_gnnpipe.engine.mode import Mode
from lightning_gnnpipe.engine.model import PipelinedModel
from lightning_gnnpipe.engine.options import EngineOptions
from lightning_gnnpipe.engine.pass_state import PassState
from lightning_gnnpipe.engine.renewal import TrainedCall
from lightning_gnnpipe.engine.resume import save_rank, take_histories
from lightning_gnnpipe.engine.run_state import RunState, SavedRun
from lightning_gnnpipe.engine.running_statistics import RunningStatistics
from lightning_gnnpipe.engine.seeds import PassSeeds
from lightning_gnnpipe.engine.stream import BatchStream
from lightning_gnnpipe.engine.training import TrainingPass
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing import guard_losses
from lightning_gnnpipe.schedule import add_transfers, fill_drain
from lightning_gnnpipe.stages import (
    Call,
    Inputs,
    KnownKinds,
    Layers,
    find_graphs,
    take_apart,
)

_MASK = (1 << 62) - 1


class PipelineEngine:
    """Runs one module as a pipeline.

    Args:
        module: The pipelined module.
        transport: The ranks.
        options: See `EngineOptions`.
        controls: Read at the start of each training step.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, options: EngineOptions, controls: Controls
    ) -> None:
        self.transport, self.options, self.controls = transport, options, controls
        self.model = PipelinedModel(module, transport, options.splitting, self._check_layers)
        self.graphs = GraphCache(options.chunks, options.histories, transport)
        self.progress = Progress()
        self._seeds = PassSeeds(options.seed, transport, self.progress, module)
        self._passes = GraphPasses(
            self.model, self.graphs, transport, options, controls, self._seeds
        )
        self.batches = BatchPasses(self.model, transport, options, self._seeds)
        self._known_kinds: KnownKinds = {}
        self.stream = BatchStream(self.model, transport, self.batches, self._known_kinds)
        self._checks = EngineChecks(self.model, self.graphs, self.batches, transport, options)
        self.num_training_passes = 0
        self.on_signals: Callable[[int], None] = lambda signals: None  # those of all ranks
        self._state = PassState()
        self._identity = GraphIdentity()
        self._saved: SavedRun | None = None
        self.last_step = LastStep(transport)
        is_quiet = not transport.world.is_root
        self._guard = LossGuard(is_quiet=is_quiet)
        self.statistics = RunningStatistics(is_quiet=is_quiet)
        self._has_jumped = False  # the loss of the last step, on this rank
        self._was_exact: bool | None = None  # the last step over one graph; None for graphs
        self._unguard: Callable[[], None] = lambda: None

    def attach(self) -> None:
        """Run behind the module's forward from now on."""
        self.model.module.__dict__["forward"] = lambda *args, **kwargs: self.forward(args, kwargs)
        self._unguard = guard_losses(self.model.intercepted.convs)

    def detach(self) -> None:
        """Give the module its own forward back."""
        self.model.module.__dict__.pop("forward", None)
        self._unguard()

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module on a batch; a collective call that gives the same output on every rank.

        Raises:
            GraphError: If the graph is malformed, or ranks were given different batches.
            UnsupportedError: If the module cannot be pipelined, or is called twice in a step.
        """
        if self.batches.early_loss.is_running:
            return self.batches.early_loss.answer()
        is_training = torch.is_grad_enabled() and self.options.is_fitting
        if is_training and self._state.awaits_backward:
            raise UnsupportedError(
                explain(
                    expected="one pipelined forward before each backward",
                    found="a second one in the same step",
                    remedy="Call the module once a step, or the second time in torch.no_grad().",
                )
            )
        call = take_apart(self.model.module, args, kwargs)
        graph_of_node = self._graph_of_node()
        call, inputs = find_graphs(call, graph_of_node, self._known_kinds)
        self._checks.graphs(call, inputs, graph_of_node)
        has_graphs = inputs.graphs is not None
        number = (self.batches.identify if has_graphs else self._identity.of)(inputs)
        if is_training or not has_graphs:
            self.stream.end()
        else:
            number = hash((number, self.stream.look(call, inputs, (args, kwargs)))) & _MASK
        agreed = agree(
            self.transport,
            self.progress,
            number,
            is_training=is_training,
            is_lost=self._is_lost,
            has_jumped=self._has_jumped,
        )
        if agreed.signals:
            self.on_signals(agreed.signals)
        if agreed.is_lost:
            self._checks.loss_of_rows()
            self.graphs.drop_histories()
            self._state.settle()
            self.progress.loss = 0.0
        self._checks.support(has_graphs)
        if not is_training:
            return self._infer(call, inputs)
        if has_graphs:
            return self._train_on_graphs(call, inputs)
        return self._train(call, inputs, is_exact=self.controls.is_exact or agreed.has_jumped)

    def note_loss(self, loss: float) -> None:
        """Take note of the loss of a training step."""
        self.progress.loss = loss
        if self.options.guards_loss and self._was_exact is not None:
            self._has_jumped = self._guard.sees_jump(loss, is_exact=self._was_exact)

    def _graph_of_node(self) -> Tensor | None:
        """Return the batch vector of the user's batch; a single graph is one to cut into chunks."""
        vector, has_replicas = self.progress.graph_of_node, self.transport.world.num_replicas > 1
        if vector is None or has_replicas or self._checks.has_seen_graphs or int(vector[-1]) > 0:
            return vector
        return None

    def abandon(self) -> None:
        """Forget a training pass whose backward never came, or has failed."""
        self._state.abandon()

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average gradients of parameters outside of the module over replicas; collective.

        Those of the module are averaged in its backward. Nothing is done while they accumulate.
        """
        if self.transport.world.num_replicas > 1 and not self.model.is_accumulating:
            average_replicated(self.transport, parameters)
            self.last_step.recount()

    @property
    def _is_lost(self) -> bool:
        """Whether the last step has left on this rank what no later one may read."""
        return self._state.is_lost or not isfinite(self.progress.loss)

    def note_validation(self) -> None:
        """Take note that a validation is over, and whether it has renewed the rows of training."""
        graph = self.graphs.trained
        if graph is not None and graph.trained_with is not None:
            graph.was_renewed = graph.is_renewed
        self.statistics.warn()

    def run_state(self) -> RunState:
        """Return what a checkpoint keeps of the run between steps, beside weights and histories."""
        self.abandon()
        if self._saved is not None:  # resumed, and no step since
            state, has_histories = self._saved.state, bool(self._saved.stages)
            state = state if has_histories else state.without_histories()
            return replace(state, num_inferences=self._seeds.num_inferences)
        graph, is_split = self.graphs.trained, self.model.is_split
        counts = self.num_training_passes, self._seeds.num_inferences
        layout = self.model.stage_layers, self.transport.mesh.num_shards if is_split else 1
        histories: tuple[int | None, tuple[Hashable, ...]] = None, ()
        owes = False
        if graph is not None and graph.plan.num_chunks > 1 and not self._passes.is_free(graph):
            histories = graph.fingerprint, tuple(graph.filled)
            owes = self.progress.validates_next() and self._passes.validation_renews(graph)
        guard = self._guard
        state = RunState(
            self.options.seed,
            *counts,
            *layout,
            *histories,
            owes,
            losses=guard.losses,
            steps_since_jump=guard.num_steps,
            was_exact=guard.was_exact,
            stale_norms=tuple(sorted(self.statistics.stale)),
        )
        return state.without_histories() if self._is_lost else state

    def stage_states(self) -> dict[int, Mapping[str, Any]]:
        """Return the histories that this rank writes to a checkpoint, by rank: see `save_rank`.

        Until the first step, a resumed run has those of the run before, of all its ranks.
        """
        world, graph = self.transport.world, self.graphs.trained
        if self._saved is not None and self._saved.stages:
            stages = enumerate(self._saved.stages)
            return {i: one for i, one in stages if i % world.size == world.rank}
        return {} if graph is None else {world.rank: save_rank(graph)}

    def resume(self, saved: SavedRun) -> None:
        """Go on with a saved run; its histories are taken at the first step on its graph."""
        self._saved = saved
        self.num_training_passes = saved.state.num_training_passes
        self._seeds.num_inferences = saved.state.num_inferences
        state = saved.state
        is_quiet = not self.transport.world.is_root
        self._guard = LossGuard(
            state.losses, state.steps_since_jump, was_exact=state.was_exact, is_quiet=is_quiet
        )
        self.statistics = RunningStatistics(state.stale_norms, is_quiet=is_quiet)
        self._has_jumped = self.options.guards_loss and state.steps_since_jump == 0
        self.model.prefer(saved.state.stage_layers)

    def _train(self, call: Call, inputs: Inputs, *, is_exact: bool) -> Any:
        check_schedule(self.options.schedule)
        self._state.begin()
        graph = self.graphs.for_training(self._identity.of(inputs), inputs)
        self._checks.chunks(graph)
        mode = self._passes.mode(call, inputs, graph)
        saved, self._saved = self._saved, None
        is_free = self._passes.is_free(graph)
        if saved is not None and not is_free:
            take_histories(saved, graph, mode, self.transport.mesh)
        if mode.reads not in graph.filled and not is_free and not is_exact:
            self._checks.new_reads(graph)
            is_exact = True
        is_due = graph.is_refresh_due(self.num_training_passes, self.controls.refreshes)
        if is_due and not is_exact and not is_free:
            self._passes.refresh(call, inputs, graph)
        is_exact = is_exact or (
            graph.plan.num_chunks == 1 and self._passes.messages(False).is_exact
        )
        parts = self._passes.parts(mode, graph, is_exact=is_exact, is_training=True)
        graph.trained_with = TrainedCall.of(call, self.model.module)
        order = self._passes.order(parts, self.progress.step_index)
        schedule = add_transfers(fill_drain(self.transport.mesh.num_stages, order))
        running = TrainingPass(parts, graph.store, self.model, schedule, is_exact=is_exact)
        self._was_exact, self._has_jumped = is_exact, False
        if not is_exact and not is_free:
            averages = self.progress.averages_weights
            self._checks.rows(graph, self.num_training_passes, averages_weights=averages)
        if not is_exact:
            self.statistics.note_pipelined(self.model.intercepted.norms)
        graph.inputs.load(call, inputs)
        output = self._run(running, call, mode)
        graph.note_step()
        if is_exact:
            graph.filled.add(mode.reads)
        return output

    def _train_on_graphs(self, call: Call, inputs: Inputs) -> Any:
        self._saved = self._was_exact = None  # there are no histories to take
        self._state.begin()
        mode = self.batches.mode(call, inputs)
        codecs = get_codecs(self._passes.messages(self.controls.is_exact).cut_codec)
        return self._run(self.batches.training(mode, call, inputs, codecs), call, mode)

    def _run(self, running: TrainingPass, call: Call, mode: Mode) -> Any:
        """Run the forward phase, and let the backward phase follow the user's."""
        outputs = running.forward(self.controls, self.num_training_passes)
        self._state.end_forward(outputs)
        self.num_training_passes += 1
        slots = [i for i, leaf in enumerate(call.leaves) if leaf.requires_grad]

        def backward(grads: Sequence[Tensor]) -> list[Tensor | None]:
            self._state.begin_backward(grads)
            leaf_grads = running.backward(grads, slots)
            is_scaled = self.progress.loss_scale() != 1  # then some overflow now and then
            self._state.end_backward([] if is_scaled else running.gradients())
            self.last_step.record = running.record()
            return leaf_grads

        joined = join(backward, outputs, [call.leaves[slot] for slot in slots])
        return mode.layers.rebuild_output(joined)

    def _infer(self, call: Call, inputs: Inputs) -> Any:
        if inputs.graphs is not None:
            mode, outputs = self.stream.run(call, inputs)
            return mode.layers.rebuild_output(outputs)
        graph = self.graphs.for_inference(self._identity.of(inputs), inputs)
        mode = self._passes.mode(call, inputs, graph)
        is_kept = self._state.awaits_backward or self.progress.averages_weights
        renews = not is_kept and self._passes.can_renew(graph, call, self.num_training_passes)
        if renews:
            self._state.begin()
        # A training pass whose backward is to come still needs its own.
        planned = PlannedInputs(graph.plan) if self._state.awaits_backward else graph.inputs
        planned.load(call, inputs)
        parts = self._passes.parts(mode, graph, is_exact=True, is_training=False, writes=renews)
        parts = replace(parts, inputs=planned)
        replaces = self.progress.is_validating and bool(self.statistics.stale) and not is_kept
        replaces = replaces and self._passes.is_alike(graph, call)
        replaced = self.statistics.replaced(graph, mode.layers) if replaces else nullcontext()
        with self.transport.meter.paused(), replaced:
            outputs = run_exact(parts, self.model)
        parts.inputs.release()
        if renews:
            graph.renew()
            self._state.settle()
        return mode.layers.rebuild_output(outputs)

    def _check_layers(self, layers: Layers, call: Call, inputs: Inputs) -> None:
        self._checks.layers(layers, call, inputs)
