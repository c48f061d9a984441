"""The engine: runs the pipelined module's forward, or a method in its place, under the strategy.

by training_step, with gradients    ->  exact or pipelined, writes histories, then backward
by evaluation steps, without        ->  exact; writes histories only if a renewal is due
else                                ->  the user's own method, on this rank alone

Evaluations that draw random numbers also run the user's own method, with the user's numbers.
Batches of several graphs run exactly, in micro-batches of whole graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import mask_weights
from lightning_gnnpipe.calls import Call, Inputs, KnownKinds, flatten_call
from lightning_gnnpipe.chunks import PassSpec
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.anomaly import find_not_finite, refuse_loss
from lightning_gnnpipe.engine.checks import EngineChecks
from lightning_gnnpipe.engine.identity import InputIdentity, InputKey
from lightning_gnnpipe.engine.known_graphs import GraphCache
from lightning_gnnpipe.engine.passes import Passes, RunningStatistics
from lightning_gnnpipe.engine.resume import RankHistories, RunState, SavedRun, save_rank
from lightning_gnnpipe.graph import ContentNumbers, fold
from lightning_gnnpipe.methods import PipelinedMethod
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.staleness import HistoryStore
from lightning_gnnpipe.steps import (
    Controls,
    Mode,
    PassSeeds,
    PipelinedModel,
    TrainingPass,
    graph_of_node,
    num_nodes,
    stored_graph,
)
from lightning_gnnpipe.steps.gradient_sums import share_gradients, without_gradients
from lightning_gnnpipe.steps.step_context import Facts, StepContext, agree, batch_number
from lightning_gnnpipe.steps.training import LastStep, PassState, join


class PipelineEngine:
    """Runs one module as a pipeline; `controls` are read at the start of each training step.

    Its `method` is pipelined; see `PipelinedMethod`.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        options: RunOptions,
        controls: Controls,
        method: str = "forward",
    ) -> None:
        self.transport, self.options, self.controls = transport, options, controls
        self.graphs = GraphCache(options, transport)
        self.model = PipelinedModel(
            module, transport, options, lambda *call: self._checks.layers(*call), self.graphs.is_cut
        )
        self.step = StepContext()
        self.loss = 0.0  # of the last training step, if it had one
        self._seeds = PassSeeds(options.seed, transport)
        self._passes = Passes(self.model, self.graphs, transport, options, controls, self._seeds)
        self._known_kinds = KnownKinds()
        self._checks = EngineChecks(self.model, self.graphs, transport, options)
        self.num_training_passes = 0
        self.state = PassState()
        self.contents = ContentNumbers()
        self.identity = InputIdentity(module, self.contents)
        self._saved: SavedRun | None = None
        self.last_step = LastStep(transport)
        self.method = PipelinedMethod(module, method, self._is_pipelined)
        self.statistics = RunningStatistics(is_quiet=not transport.world.is_root)
        self._has_record = False  # a pass of the present step has ended

    def set_step(self, **facts: Any) -> None:
        """Update fields of the current `StepContext`."""
        self.step = replace(self.step, **facts)
        self._seeds.step_index = self.step.step_index

    @contextmanager
    def called_by(self, caller: Literal["training", "evaluation"]) -> Iterator[None]:
        """Run the user's step within the block: its calls of the module are pipelined."""
        self.set_step(caller=caller)
        try:
            yield
        finally:
            self.set_step(caller=None)

    def _is_pipelined(self) -> bool:
        """Whether a call of the module belongs to the pipeline; equal on all ranks in a step."""
        has_grads, caller = torch.is_grad_enabled(), self.step.caller
        if torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            is_pipelined = False
        elif caller == "evaluation" and not has_grads:
            module = self.model.module  # weights made in inference mode have no version
            is_pipelined = not any(one.training for one in module.modules())
            is_pipelined &= not any(one.is_inference() for one in module.parameters())
        else:
            is_pipelined = caller == "training" and has_grads
        if not is_pipelined:
            self.model.staged.check_whole()
        return is_pipelined

    def attach(self) -> None:
        """Put the pipeline behind the module's method."""
        self.method.attach(self.forward)

    def detach(self) -> None:
        self.method.detach()

    def forward(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward"
    ) -> Any:
        """Run the module on a batch; collective, with the same output on every rank."""
        is_training = torch.is_grad_enabled() and self.options.is_fitting
        self._checks.hooks()
        module, batch, known = self.model.module, self.step.batch, self.model.matrices
        mask_weights(module)
        stored = stored_graph(batch)
        if stored is not self.options.stored:
            self.options.open(stored)
        call = flatten_call(module, args, kwargs, lambda: num_nodes(batch), method, known)
        call, in_batch = self._checks.find_batch(call, graph_of_node(batch))
        call = call if in_batch is not None else self.model.attach(call)
        call, inputs = self._known_kinds.find_graphs(call, in_batch)
        self._checks.graphs(call, inputs, in_batch)
        has_graphs = inputs.graphs is not None
        if is_training and self.state.num_awaiting:
            self._checks.several_forwards(has_graphs)
        key = None
        if inputs.graphs is not None:
            number = fold([inputs.num_nodes, inputs.graphs.num_graphs, *inputs.edge_sizes])
        else:
            key = self.identity.of(call, inputs, self._batch_number)
            key = key.at_call(self.state.num_awaiting if is_training else 0)
            number = key.graph
        facts = Facts(
            self._batch_number() if self.transport.world.is_distributed else 0,
            self.loss,
            number,
            sum([one.training for one in module.modules()]),
            self.state.is_lost,
            0 if key is None else key.number,
            self.graphs.num_bytes,
            self.model.has_changed(call, inputs),
        )
        is_uneven = self.step.is_uneven
        agreed = agree(self.transport, facts, is_training=is_training, is_uneven=is_uneven)
        self.model.is_due = agreed.is_traced
        if agreed.is_lost:
            self._checks.loss_of_rows()
            self.graphs.inputs.drop_rows()
            self.state.settle()
        self._checks.support(has_graphs)
        if not self.model.is_split:
            self._checks.start(inputs, is_training=is_training)
        try:
            if is_training:
                return self._train(call, inputs, key, agreed)
            mode = self._passes.mode(call, inputs, key)
            if not mode.is_random:
                outputs, has_drawn = self._infer(mode, call, inputs, key, agreed)
                if not max(self.transport.meet("evaluate the module", [has_drawn]))[0]:
                    return mode.finish(outputs, call)
                self.model.note_random(mode)
            with self.model.staged.gathered():
                return self.method.own()(*args, **kwargs)
        finally:
            if key is not None:
                self.identity.end_pass()
                if self.model.is_new:
                    self.model.end_pass()

    def _batch_number(self) -> int:
        return batch_number(self.step.batch, self.contents)

    def refuse_loss(self, loss: float, epoch: int) -> NoReturn:
        """End the run, since the loss of a step is not finite; collective."""
        found = (search() for search in self.state.searches)
        refuse_loss(loss, epoch, next(filter(None, found), None))

    def share_gradients(self, root: nn.Module) -> None:
        """Give all ranks equal gradients of all weights of `root`; collective."""
        if self.transport.world.is_distributed and not self.model.is_accumulating:
            own = self.model.of_stages_only(root)
            share_gradients(self.transport, root, own, self.model.staged)
            self.last_step.recount()

    def run_state(self) -> RunState:
        """Return the state of the run for a checkpoint, without weights and rows."""
        self.state.abandon()
        if self._saved is not None:  # resumed, no step yet
            saved = self._saved
            return saved.state if saved.stages else saved.state.without_histories()
        num_shards = self.transport.mesh.num_shards if self.model.is_split else 1
        state = RunState(
            self.options.seed,
            self.num_training_passes,
            self.model.stage_layers,
            num_shards,
            self._passes.input_states(),
            stale_norms=tuple(sorted(self.statistics.stale)),
            num_random_inputs=self.identity.num_random,
            chosen_chunks=self.options.chosen,
        )
        return state.without_histories() if self.state.is_lost else state

    def stage_states(self) -> dict[int, RankHistories]:
        """Return the histories that this rank writes to a checkpoint, by rank: see `save_rank`.

        Before its first step a resumed run returns the loaded histories, divided over the ranks.
        """
        world = self.transport.world
        if self._saved is not None and self._saved.stages:
            stages = enumerate(self._saved.stages)
            return {i: one for i, one in stages if i % world.size == world.rank}
        found: dict[int, list[Mapping[str, Any]]] = {
            number: list(saved.parts[world.rank :: world.size])
            for number, saved in self.graphs.inputs.saved.items()
        }
        found |= {number: [save_rank(own)] for number, own in self._passes.kept_inputs().items()}
        return {world.rank: found} if found else {}

    def resume(self, saved: SavedRun) -> None:
        """Continue a saved run; the first step on an input takes its saved histories."""
        self._saved, state = saved, saved.state
        self.num_training_passes = state.num_training_passes
        self.statistics.stale = set(state.stale_norms)
        self.model.preferred, self.options.chosen = state.stage_layers, state.chosen_chunks

    def _train(self, call: Call, inputs: Inputs, key: InputKey | None, agreed: Facts) -> Any:
        """Run the forward phase; autograd runs the backward phase at the outputs."""
        self.state.begin()
        is_resumed = self._take_saved()
        if key is not None and self.graphs.trained is None:
            options = self.options
            is_measured = options.num_stages > 1 or options.given.memory_gib is not None
            if not (options.cut.has_free_chunks and is_measured):  # else K is not known yet
                self.graphs.cut(key.graph, inputs)  # layers are measured on its chunks
        mode = self._passes.mode(call, inputs, key)
        if key is not None:
            return self._train_on_graph(mode, call, inputs, key, agreed, is_resumed=is_resumed)
        is_exact = self.controls.is_exact
        over = partial(self._passes.over_batch, mode, call, inputs)
        spec = over(is_exact=is_exact, is_training=True)
        if self.model.on_split is not None:
            self.model.tell_split(mode, inputs, spec.plan)
        exact = partial(over, is_exact=True, is_training=False)
        return self._run(spec, None, call, mode, exact, is_exact=spec.codecs.is_exact)

    def _train_on_graph(
        self,
        mode: Mode,
        call: Call,
        inputs: Inputs,
        key: InputKey,
        agreed: Facts,
        *,
        is_resumed: bool,
    ) -> Any:
        known, number = self.graphs.inputs, self.num_training_passes
        is_exact = self.controls.is_exact or self.options.trains_exactly
        key = key.reading(mode.layers.read_leaves(), mode.options, agreed.input)
        own = self.graphs.for_training(key, inputs, agreed.num_bytes)
        if self.model.on_split is not None:
            self.model.tell_split(mode, inputs, own.graph.plan)
        needs_no_history = self._passes.needs_no_history(own.graph)
        if not own.filled and not needs_no_history:
            self._checks.chunks(own.graph)
        if not needs_no_history and (is_resumed or known.saved):
            self._passes.take_saved(own, key.number, mode, is_resumed=is_resumed)
        if self.controls.refreshes:
            known.ask_refresh()
            self.controls.refreshes = False  # a later call of the step asks no more
        is_new = mode.reads not in own.filled and not needs_no_history
        if is_new and not is_exact and own.filled:
            self._checks.new_reads()
        is_first_visit = is_new and not is_exact and own.last_step < 0
        known.note(key, number + 1, is_new=is_first_visit and self.graphs.is_cut(inputs))
        is_exact = is_exact or is_new
        if own.is_refresh_due and not is_exact and not needs_no_history:
            self._passes.refresh(call, inputs, own, key)
        is_exact = is_exact or (own.graph.plan.num_chunks == 1 and self._passes.sends_exactly)
        spec = self._passes.training(mode, own, is_exact=is_exact)
        if not is_exact and self.model.intercepted.norms:
            self.statistics.note_pipelined(self.model.intercepted.norms)
        own.inputs.load(call, inputs, key.leaves)
        exact = partial(self._passes.over_graph, mode, own.graph, own.graph.reading, own.inputs)
        output = self._run(spec, own.store, call, mode, exact, is_exact=is_exact)
        known.end_step(own, number, mode.frozen)
        if is_exact:
            own.filled = {mode.reads}
        return output

    def _take_saved(self) -> bool:
        """Pass saved histories to the cache; return whether the run is resumed."""
        saved, self._saved = self._saved, None
        if saved is None:
            return False
        self.graphs.inputs.resume(saved)
        self.identity.num_random += saved.state.num_random_inputs
        return saved.state.num_training_passes > 0

    def _run(
        self,
        spec: PassSpec,
        store: HistoryStore | None,
        call: Call,
        mode: Mode,
        exact: Callable[[], PassSpec],
        *,
        is_exact: bool,
    ) -> Any:
        running = TrainingPass(spec, store, self.model, mode, is_exact=is_exact)
        number, is_first = self.num_training_passes, self.state.num_awaiting == 0
        outputs = running.forward(self.controls, number, is_first=is_first)
        self.model.share_statistics(replaced=False)
        search = partial(find_not_finite, self._passes, self.transport, mode, call, exact)
        self.state.end_forward(number, outputs, search)
        self.num_training_passes += 1
        self._has_record = self._has_record and not is_first
        readers = mode.readers_of(call)
        names, values = mode.layers.outputs, mode.layers.values
        zeros = [(output.new_zeros(()), output.shape) for output in outputs]

        def backward(found: Sequence[Tensor | None]) -> list[Tensor | None]:
            used = [name for name, grad in zip(names, found, strict=True) if grad is not None]
            absent = mode.without_gradient(self.model.module, used)
            grads = [
                like.expand(shape) if grad is None else grad
                for (like, shape), grad in zip(zeros, found, strict=True)
            ]
            is_scaled = self.step.loss_scale != 1  # loss scaling: overflows are normal
            self.state.begin_backward(number, [] if is_scaled else grads)
            with without_gradients(self.model.module, absent):
                leaf_grads = running.backward(grads, readers)
            self.state.end_backward([] if is_scaled else running.gradients())
            record, earlier = running.record(), self.last_step.record
            if self._has_record and earlier is not None:
                record = record.after(earlier)
            self.last_step.record, self._has_record = record, True
            pairs = zip(readers, leaf_grads, strict=True)
            return [None if f"leaf_{slot}" in absent else grad for slot, grad in pairs]

        flows = [values[name].requires_grad for name in names]
        flows = flows if any(flows) else [one.is_floating_point() for one in outputs]  # all frozen
        joined = join(backward, outputs, flows, [*map(call.leaves.__getitem__, readers)])
        return mode.finish(joined, call, self._seeds.of_head)

    def _infer(
        self, mode: Mode, call: Call, inputs: Inputs, key: InputKey | None, agreed: Facts
    ) -> tuple[list[Tensor], bool]:
        """Return the outputs of an exact pass, and whether this rank has drawn random numbers."""
        if key is None:
            spec = self._passes.over_batch(mode, call, inputs, is_exact=True, is_training=False)
            return self._passes.run_exact(spec)
        graph = self.graphs.for_inference(key.graph, inputs)
        key = key.reading(mode.layers.read_leaves(), mode.options, agreed.input)
        averages = self.step.averages_weights
        own = None if averages else self._passes.trained_alike(key, mode, graph)
        renews = own is not None and self._passes.can_renew(own)
        if renews:
            self.state.begin()
        planned = graph.inputs
        planned.load(call, inputs, key.leaves)
        context = own.writing if renews and own is not None else graph.reading
        replaces = self.step.is_validating and bool(self.statistics.stale) and own is not None
        replaced = self.statistics.replaced(graph, mode.layers) if replaces else nullcontext()
        with replaced:
            spec = self._passes.over_graph(mode, graph, context, planned)
            outputs, has_drawn = self._passes.run_exact(spec)
        self.model.share_statistics(replaced=replaces)
        planned.release()
        if renews and own is not None:
            own.renew()
            self.state.settle()
        return outputs, has_drawn
