"""The pipeline engine: what the pipelined module's forward does under the strategy.

forward, with gradients  ->  training pass: exact or pipelined schedule, histories written,
                             backward to follow
forward, without         ->  exact pass, histories untouched
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import MessageOptions, Transport, get_codec
from lightning_gnnpipe.controls import Controls
from lightning_gnnpipe.engine.agree import Progress, agree
from lightning_gnnpipe.engine.autograd import join
from lightning_gnnpipe.engine.choice import LayoutChoice
from lightning_gnnpipe.engine.chunk_run import make_seeds
from lightning_gnnpipe.engine.costs import measure_layers
from lightning_gnnpipe.engine.graph import GraphCache, PlannedGraph
from lightning_gnnpipe.engine.identity import GraphIdentity
from lightning_gnnpipe.engine.infer import run_exact
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.last_step import LastStep
from lightning_gnnpipe.engine.mode import Mode
from lightning_gnnpipe.engine.model import PipelinedModel
from lightning_gnnpipe.engine.options import EngineOptions
from lightning_gnnpipe.engine.probe import check_layers
from lightning_gnnpipe.engine.resume import RunState, SavedRun, load_ranks, save_rank
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.engine.step import StepParts
from lightning_gnnpipe.engine.step_costs import StepCosts
from lightning_gnnpipe.engine.switch import switched
from lightning_gnnpipe.engine.training import TrainingPass
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.passing import guard_losses
from lightning_gnnpipe.stages import Call, Inputs, Layers, classify, is_listed, take_apart

log = logging.getLogger(__name__)


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
        self.model = PipelinedModel(
            module, transport, options.balance, options.repeat_encoder, self._check
        )
        self.graphs = GraphCache(options.chunks, options.histories, transport)
        self.choice = LayoutChoice(transport, self.model, self.graphs, options)
        self.progress = Progress()
        self.num_training_passes = 0
        self.on_signals: Callable[[int], None] = lambda signals: None  # those of all ranks
        self._has_pending = False
        self._num_inferences = 0
        self._identity = GraphIdentity()
        self._saved: SavedRun | None = None
        self.last_step = LastStep(transport)
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
            UnsupportedError: If the module cannot be pipelined, or is called twice before a
                backward.
        """
        is_training = torch.is_grad_enabled() and self.options.is_fitting
        if is_training and self._has_pending:
            raise UnsupportedError(
                explain(
                    expected="one pipelined forward before each backward",
                    found="a second one in the same step",
                    remedy="Call the module once a step, or the second time in torch.no_grad().",
                )
            )
        call = take_apart(self.model.module, args, kwargs)
        inputs = classify(call)
        graph = self._identity.of(inputs)
        signals = agree(self.transport, self.progress, is_training, graph)
        if signals:
            self.on_signals(signals)
        if not self.transport.is_settled:
            self.choice.settle(call, inputs, graph)
        return (self._train if is_training else self._infer)(call, inputs)

    def abandon(self) -> None:
        """Forget a training pass whose backward never came."""
        self._has_pending = False

    def run_state(self) -> RunState:
        """Return what a checkpoint keeps of the run, beside weights and histories."""
        if self._saved is not None:  # resumed, and no step since
            state, has_histories = self._saved.state, bool(self._saved.stages)
            state = state if has_histories else state.without_histories()
            return replace(state, num_inferences=self._num_inferences)
        graph = self.graphs.trained
        counts = self.num_training_passes, self._num_inferences
        is_split = self.model.is_split
        layout = self.model.stage_layers, self.transport.mesh.num_shards if is_split else 1
        histories: tuple[int | None, tuple[Hashable, ...]] = None, ()
        if graph is not None and graph.plan.num_chunks > 1:
            histories = self.graphs.trained_fingerprint, tuple(graph.filled)
        return RunState(self.options.seed, *counts, *layout, *histories)

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
        if self.graphs.trained is not None:
            self.graphs.trained.drop_histories()
        self.num_training_passes = saved.state.num_training_passes
        self._num_inferences = saved.state.num_inferences
        self.prefer(saved.state)

    def prefer(self, state: RunState) -> None:
        """Deal ranks and layers out as in an earlier run, where that is possible."""
        self.model.prefer(state.stage_layers)
        self.choice.prefer((len(state.stage_layers), state.num_shards))

    def _train(self, call: Call, inputs: Inputs) -> Any:
        graph = self.graphs.for_training(self._identity.of(inputs), inputs)
        mode = self._mode(call, inputs, graph)
        if self._saved is not None:
            self._take_histories(self._saved, graph, mode)
        is_exact = self.controls.is_exact or mode.reads not in graph.filled
        if self.controls.refreshes and not is_exact:
            self._refresh(call, inputs, graph)
        is_exact = is_exact or (graph.plan.num_chunks == 1 and self.options.messages.is_exact)
        parts = self._parts(mode, graph, is_exact=is_exact, is_training=True)
        order = chunk_order(
            parts.plan.num_chunks,
            epoch=self.progress.step_index,
            seed=self.options.seed,
            shuffle=self.options.shuffle_chunks,
        )
        running = TrainingPass(parts, graph, self.model, order, is_exact=is_exact)
        graph.inputs.load(call, inputs)
        outputs = running.forward(self.controls, self.num_training_passes)
        if is_exact:
            graph.filled.add(mode.reads)
        self._has_pending = True
        self.num_training_passes += 1
        slots = [i for i, leaf in enumerate(call.leaves) if leaf.requires_grad]

        def backward(grads: Sequence[Tensor]) -> list[Tensor | None]:
            leaf_grads = running.backward(grads, slots)
            self._has_pending = False
            self.last_step.record = running.record()
            return leaf_grads

        joined = join(backward, outputs, [call.leaves[slot] for slot in slots])
        return mode.layers.rebuild_output(joined)

    def _infer(self, call: Call, inputs: Inputs) -> Any:
        graph = self.graphs.for_inference(self._identity.of(inputs), inputs)
        mode = self._mode(call, inputs, graph)
        parts = self._parts(mode, graph, is_exact=True, is_training=False)
        if self._has_pending:  # the training pass still needs its own
            parts = replace(parts, inputs=PlannedInputs(graph.plan))
        parts.inputs.load(call, inputs)
        with self.transport.meter.paused():
            outputs = run_exact(parts, self.model)
        parts.inputs.release()
        return mode.layers.rebuild_output(outputs)

    def _take_histories(self, saved: SavedRun, graph: PlannedGraph, mode: Mode) -> None:
        """Give the graph the saved histories, if they are its own and those of these layers."""
        self._saved = None
        state = saved.state
        is_same = state.graph == self.graphs.trained_fingerprint and saved.stages
        if is_same and sum(state.stage_layers) == sum(self.model.stage_layers):
            stage = mode.stages[self.transport.mesh.stage]
            if load_ranks(graph, saved.stages, {segment.index for segment in stage.segments}):
                graph.filled.update(state.filled)
                return
        has_trained = state.num_training_passes > 0
        if has_trained and graph.plan.num_chunks > 1 and self.transport.world.is_root:
            log.warning(
                "The checkpoint has no histories of this graph, these chunks and layers: from "
                "resuming a pipelined run to an exact first step, which fills them."
            )

    def _refresh(self, call: Call, inputs: Inputs, graph: PlannedGraph) -> None:
        """Recompute all histories by an exact pass with dropout off."""
        graph.store.recorder = None
        norms = self.model.intercepted.norms.values()
        with switched(self.model.module, False, but=norms), torch.no_grad():
            mode = self._mode(call, inputs, graph)
            graph.inputs.load(call, inputs)
            parts = self._parts(mode, graph, is_exact=True, is_training=False, writes=True)
            parts.context.is_refresh = True
            run_exact(parts, self.model)
            parts.context.is_refresh = False

    def _mode(self, call: Call, inputs: Inputs, graph: PlannedGraph) -> Mode:
        def measure(layers: Layers) -> StepCosts:
            plan = self.graphs.plan_to_measure(graph, inputs)
            planned = PlannedInputs(plan)
            planned.load(call, inputs)
            histories = self.graphs.histories
            return measure_layers(self.model.module, layers, plan, planned, histories)

        return self.model.mode(call, inputs, measure, also_train=self.options.is_fitting)

    def _parts(
        self,
        mode: Mode,
        graph: PlannedGraph,
        *,
        is_exact: bool,
        is_training: bool,
        writes: bool = False,
    ) -> StepParts:
        shard = self.transport.mesh.shard
        if is_training:
            seeds = make_seeds(self.options.seed, self.progress.step_index, shard)
        else:
            self._num_inferences += self.model.module.training  # dropout is on
            seeds = make_seeds(~self.options.seed, self._num_inferences, shard)
        messages = self._messages(is_exact)
        # Otherwise histories would never be read.
        is_shared = self.options.histories.recomputes and graph.plan.shard is not None
        has_stale = graph.plan.num_chunks > 1 or self.options.messages.is_async or is_shared
        context = graph.writing if (is_training or writes) and has_stale else graph.reading
        if isinstance(context.store, SharedStore):
            is_synchronous = is_exact or self.controls.is_synchronous
            context.store.begin_pass(messages, is_synchronous=is_synchronous)
        if is_training:
            self.transport.begin_step(seeds(self.transport.world.rank, -1))
        return StepParts(
            stage=mode.stages[self.transport.mesh.stage],
            outputs=tuple(mode.layers.values[name] for name in mode.layers.outputs),
            plan=graph.plan.whole if is_exact else graph.plan,
            inputs=graph.inputs,
            context=context,
            transport=self.transport,
            seed_of=seeds if is_training or self.model.module.training else None,
            is_training=is_training,
            recompute=self.options.histories.recomputes,
            codec=get_codec(messages.cut_codec),
        )

    def _messages(self, is_exact: bool) -> MessageOptions:
        """Return how messages of a pass are sent."""
        messages = self.options.messages
        if is_exact:
            return replace(messages, halo_codec="fp32", cut_codec="fp32")
        if self.controls.halo_codec is not None:
            return replace(messages, halo_codec=self.controls.halo_codec)
        return messages

    def _check(self, layers: Layers, call: Call, inputs: Inputs) -> None:
        module, is_cut = self.model.module, self.graphs.is_cut(inputs)
        if self.options.self_check and (is_cut or is_listed(module)):
            trains = self.options.is_fitting and (module.training or torch.is_grad_enabled())
            check_layers(module, layers, call, inputs, on_chunks=is_cut, with_gradients=trains)
