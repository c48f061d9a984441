"""The user's module as a pipeline: traced once per mode, cut into layers, assigned to stages.

Until the first call, which shows the arguments, every rank holds all parameters, as one device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, classify
from lightning_gnnpipe.chunks import StepCosts
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import Fallbacks, UnsupportedError
from lightning_gnnpipe.graph import ChunkPlan, text_fingerprint
from lightning_gnnpipe.layers import find_layers, without_memory
from lightning_gnnpipe.methods import own_methods, raising_own_errors
from lightning_gnnpipe.passing import Matrices
from lightning_gnnpipe.stages import (
    HeldTensors,
    Layers,
    Reads,
    Stage,
    check_counts,
    check_num_stages,
    choose_held,
    choose_repeated,
    cut_module,
    find_users,
    names_of_head,
    names_read_whole,
    solve_balance,
    split_layers,
    switched,
)
from lightning_gnnpipe.steps.gradient_sums import GradientSums
from lightning_gnnpipe.steps.modes import Key, Mode, check_norms, reads_key, trace_key
from lightning_gnnpipe.steps.partitioner import EngineOptions, Measure
from lightning_gnnpipe.steps.tables import Tables
from lightning_gnnpipe.steps.weight_reads import WeightReads
from lightning_gnnpipe.steps.weights import StageWeights, check_leaves, check_same, check_shared

log = logging.getLogger(__name__)

_NUM_MODES, _MANY_CHANGES = 8, 4

Check = Callable[[Layers, Call, Inputs], None]
OnSplit = Callable[[Sequence[Stage], dict[str, set[int]], list[float]], None]


class PipelinedModel:
    """The user's module, cut into stages.

    `check` refuses a new trace, while all parameters are here, if chunks change the results.
    `is_cut` returns whether training may cut a graph into chunks or shards.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        options: EngineOptions,
        check: Check,
        is_cut: Callable[[Inputs], bool],
    ) -> None:
        self.module, self.intercepted = module, find_layers(module)
        self._transport, self._options = transport, options
        self._check, self._is_cut, self._modes = check, is_cut, dict[Key, Mode]()
        self._num_changes = 0  # of options that forward reads
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)
        self.on_split: OnSplit | None = None  # called with stages, users of parameters, costs
        self.costs: StepCosts | None = None  # once measured
        self.stage_layers: tuple[int, ...] = ()  # number of layers of each stage, once assigned
        self.preferred: tuple[int, ...] = ()  # layers per stage, if they fit, not measured ones
        self._users: dict[str, set[int]] = {}
        self._of_head: set[str] = set()  # weights that only the head uses, on every rank
        self.shared_outside: dict[int, str] = {}  # see `check_shared`
        self.tables = Tables(module, transport.mesh, self._fallbacks)
        self._weights = [StageWeights(module, transport, self.tables)]  # then of copies
        self.matrices = Matrices()  # sparse matrices among the arguments
        self._held = HeldTensors(module, self._try, self._weights[0].shape_of, self.matrices)
        self.reads = WeightReads(transport, self._weights, lambda: self._users, self.tables)
        self.is_accumulating = False  # if so, replicas do not average gradients

    @property
    def is_split(self) -> bool:
        """Whether the layers have been assigned."""
        return bool(self.stage_layers)

    @property
    def has_all_weights(self) -> bool:
        """Whether this rank holds all weights of the module."""
        return not (self.is_split and (self.tables.names or self._transport.mesh.num_stages > 1))

    def tensor_ids(self) -> tuple[set[int], set[int]]:
        """Return ids of this stage's tensors, which it is the first to use, and of all the rest."""
        own, foreign = set[int](), set[int]()
        for name, tensor in self._weights[0].named(self._users).items():
            is_own = min(self._users[name]) == self._transport.mesh.stage
            (own if is_own else foreign).add(id(tensor))
        return own, foreign

    def attach(self, call: Call) -> Call:
        """Return the call with the tensors that forward reads beside its arguments as leaves."""
        if call.has_graphs or call.signature in self._held.without:
            return call
        with own_methods(self.module):
            known = self._held.known(call)
            if known is None:
                verb = "train" if torch.is_grad_enabled() else "evaluate"
                self.reads.meet(f"{verb} the pipelined module", (0,))
                with self.whole():
                    found = self._held.find(call)
                known = self._held.known(call) or found  # with the weights as they are now
            return replace(known, tables=self.tables)

    def place_tables(
        self, call: Call, inputs: Inputs, mode: Mode, plan: ChunkPlan, *, trains: bool
    ) -> Call:
        """Divide tables over shards, or put them together; return the call with the weights."""
        tables, modes, names = self.tables, self._modes.values(), frozenset[str]()
        if trains and tables.candidates and not tables.names and plan.shard is not None:
            names = tables.choose(call, inputs, modes, self._users, self.reads.optimizers)
            self.reads.watch(is_full=self.reads.is_full)
        if not names and (not tables.names or tables.serve(plan, mode)):
            return call
        with self.whole():
            tables.begin(names, plan) if names else tables.end(self.reads.gather_states)
        return call.with_weights(self.module)

    def _try(self, call: Call) -> None:
        if self._is_cut(inputs := classify(call)):
            self._trace_all(call, inputs, also_train=False)

    def mode(self, call: Call, inputs: Inputs, measure: Measure, *, also_train: bool) -> Mode:
        """Return the mode of these arguments; trace the module and assign layers if it is new.

        `measure` returns layer costs, once, on rank 0. With `also_train` the first call traces
        training mode too, which may use more parameters.
        """
        with own_methods(self.module):
            key = self._find(call, inputs)
            if key is None and self.is_split:
                self._note_change()
            if key is None or not self._modes[key].stages:
                self._weights[0].check_kept()
                with self.whole():
                    key = self._trace_all(call, inputs, also_train=also_train)
                    self._assign_layers(inputs, measure, trains=also_train)
        self._modes[key] = mode = self._modes.pop(key)  # now most recently used
        return mode

    def _find(self, call: Call, inputs: Inputs) -> Key | None:
        """Return the key of the trace for the module's present state, if there is one."""
        first = trace_key(self.module, call, inputs, self._transport.world.device)
        for key in reversed(self._modes):
            layers = self._modes[key].layers
            is_fit = layers.num_rows in ((), (inputs.num_nodes, *inputs.edge_sizes))
            if key[0] == first and is_fit and layers.outside.values() == key[1]:
                return key
        return None

    def _trace_all(self, call: Call, inputs: Inputs, *, also_train: bool) -> Key:
        known, call = set(self._modes), replace(call.with_weights(self.module), tables=None)
        key = self._trace(call, inputs)
        if also_train and not self.is_split:
            for training in (True, False):
                with switched(self.module, training):
                    self._trace(call, inputs)
        if new := self._modes.keys() - known:
            options = self._options_number()
            for one in new:
                self._modes[one] = replace(self._modes[one], options=options)
        lengths = {len(mode.layers.segments) for mode in self._modes.values()}
        if len(lengths) > 1:
            raise UnsupportedError(
                expected="the forward to run the same number of layers in all steps, in "
                "training and in evaluation",
                found=f"{sorted(lengths)} layers",
                remedy="Call the same layers in both modes and in all epochs; drop edges in "
                "training_step, not in forward. Or name one method with GNNPipeStrategy("
                "pipelined_module='net.encode'): what else is called runs whole on each device.",
            )
        return key

    def _options_number(self) -> int:
        """Return one fingerprint for all modes: options that any mode reads, and weight shapes."""
        reads = Reads.merged([mode.layers.outside for mode in self._modes.values()])
        shapes = [(tuple(p.shape), p.dtype) for p in self.module.parameters()]
        own = text_fingerprint(repr((reads.plain(reads.values()), shapes)))
        return self._transport.broadcast_object(own)  # some options differ between processes

    def add_copy(self, module: nn.Module) -> StageWeights:
        """Empty and fill a copy of the module along with it; on all ranks in the same order."""
        assert not self.is_split
        self._weights.append(StageWeights(module, self._transport, self.tables))
        return self._weights[-1]

    def complete(
        self,
        state: dict[str, Tensor],
        root: nn.Module,
        prefix: str = "",
        weights: StageWeights | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        """Put the full tensors of all stages, or those with `names`, into `state`; collective.

        `state` is of `root`, which holds the module, with `prefix` before each name.
        """
        weights = weights or self._weights[0]
        users = {n: one for n, one in self._users.items() if names is None or n in names}
        named, full = weights.named(users), weights.assemble(users)
        by_id = {id(named[name]): tensor for name, tensor in full.items()}
        for tensors in (root.named_parameters, root.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                if prefix + name in state and id(tensor) in by_id:
                    state[prefix + name] = by_id[id(tensor)]

    def restore(self) -> None:
        """Give every rank all parameters again, and undo the split; collective."""
        with self.reads.inside():
            self._fill()
        self.forget()

    def forget(self) -> bool:
        """Undo the split without communication; return whether this rank lacks weights."""
        is_partial = self._weights[0].is_partial
        self.reads.release()
        self._modes.clear()
        self.stage_layers, self._users, self._of_head = (), {}, set()
        self.tables.clear()
        for weights in self._weights:
            weights.forget()
        return is_partial

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all parameters within the block, then only this stage's; collective."""
        with self.reads.inside():
            self._fill()
            has_stages = self._transport.mesh.num_stages > 1  # autograd may have saved weights
            keeps = self.reads.is_full or (has_stages and torch.is_grad_enabled())
            try:
                yield
            finally:
                keeps = keeps and (has_stages or bool(self.tables.names))
                for weights in () if keeps else self._weights:
                    weights.empty(self._users)
                self.reads.watch(is_full=keeps)

    def begin_backward(self) -> GradientSums:
        averages = not self.is_accumulating
        has_replicas = self._transport.world.num_replicas > 1
        users = self._users if has_replicas else self._users_in_stages
        cut = self.tables.names if self.tables.is_cut else ()
        return GradientSums(self.module, users, self._transport, averages=averages, cut=cut)

    @property
    def _users_in_stages(self) -> dict[str, set[int]]:
        """The stages of each tensor that stages use: every rank has the gradients of the head."""
        return {name: one for name, one in self._users.items() if name not in self._of_head}

    def _note_change(self) -> None:
        """Warn once if options that forward reads change often, at a trace each."""
        (_, before, _), mode = next(reversed(self._modes.items()))
        changed = mode.layers.outside.changed(before, mode.layers.outside.values())
        self._num_changes += bool(changed)
        if changed and self._num_changes == _MANY_CHANGES:
            self._fallbacks.tell(
                f"Forward reads {', '.join(changed)}, which changes often",
                origin="one trace of the module",
                to="a new trace after each change",
                remedy="To trace once, keep numbers in a buffer and change it in place: "
                "self.scale.fill_(0.5).",
            )

    def _trace(self, call: Call, inputs: Inputs) -> Key:
        """Trace the module in its present mode, unless cached."""
        if (found := self._find(call, inputs)) is not None:
            return found
        check_leaves(self.module)
        self.intercepted, records = find_layers(self.module), torch.is_grad_enabled()
        with (
            without_memory(self.intercepted.convs),
            torch.inference_mode(False),
            raising_own_errors(self.module, call, inputs),
        ):
            layers = cut_module(
                self.module,
                call,
                inputs,
                self.intercepted.all,
                finds_repeatable=bool(self._options.repeat_encoder),
                is_grad_enabled=records,
                is_cut=inputs.graphs is not None or self._is_cut(inputs),
            )
            self._check(layers, call, inputs)
        called = (self.module,) if layers.head is None else layers.called(self.module)
        self.intercepted = self.intercepted.within(called, has_sums=layers.has_sums)
        first = trace_key(self.module, call, inputs, self._transport.world.device)
        key = (first, layers.outside.values(), layers.num_rows)
        reads = reads_key(self.module, call, self.intercepted.norms.values(), layers)
        frozen = tuple(not p.requires_grad for p in self.module.parameters())
        whole = frozenset(names_read_whole(layers, self.module))
        self._modes[key] = Mode(layers, (), reads, self.module.training, 0, frozen, whole)
        return key

    def _assign_layers(self, inputs: Inputs, measure: Measure, *, trains: bool) -> None:
        is_first_time = not self.is_split
        if is_first_time:
            self.stage_layers = self._count_layers(inputs, measure)
        counts, users = self.stage_layers, dict(self._users)
        in_stages = set(self._users_in_stages)
        modes = sorted(self._modes.items(), key=lambda item: not item[1].is_training)
        for key, mode in modes:
            if not mode.stages:
                repeated = self._repeated(mode.layers, inputs)
                # Evaluation must not make stages share weights: their gradients would be summed.
                if not is_first_time or mode.is_training != modes[0][1].is_training:
                    repeated = choose_held(mode.layers, counts, repeated, self.module, users)
                mode = replace(mode, stages=split_layers(mode.layers, counts, repeated))
                self._modes[key] = mode
            self._of_head |= names_of_head(mode.layers, self.module)
            for name, stages in find_users(mode.stages, self.module).items():
                in_stages.add(name)
                places = {stage % self._transport.mesh.num_stages for stage in stages}
                users[name] = users.get(name, set()) | places
        users |= {name: set(range(self._transport.mesh.num_stages)) for name in self._of_head}
        self._of_head -= in_stages
        if trains and not is_first_time and self._transport.world.num_replicas > 1:
            check_same(self._users, users)
        self._users = {name: users[name] for name in sorted(users)}
        if self._transport.mesh.num_stages > 1:
            check_shared(self.shared_outside, self.module, self._users)
        found = self.intercepted
        check_norms(found.norms | found.batch_norms, self._users_in_stages)
        if is_first_time:
            self._tell_split([self._modes[key] for key, _ in modes], inputs)
        while len(self._modes) > _NUM_MODES:
            del self._modes[next(iter(self._modes))]

    def _repeated(self, layers: Layers, inputs: Inputs) -> Sequence[str]:
        num_shards = self._transport.mesh.num_shards
        return choose_repeated(layers, self._options.repeat_encoder, inputs.num_rows, num_shards)

    def _tell_split(self, modes: Sequence[Mode], inputs: Inputs) -> None:
        stages = modes[0].stages
        if self.on_split is not None:
            costs = [] if self.costs is None else list(map(self.costs.of, stages))
            users = find_users([stage for mode in modes for stage in mode.stages], self.module)
            self.on_split(stages, users, [sum(c.compute_s for c in one) for one in costs])
        is_idle = self._options.repeat_encoder is True and not any(s.repeated for s in stages)
        if is_idle and len(stages) > 1:
            why = "mixes rows" if inputs.graphs is None else "is of a batch of graphs"
            self._fallbacks.tell(
                f"repeat_encoder=True has no effect, since what stages receive {why}",
                origin="computing it again",
                to="receiving it",
            )

    def _count_layers(self, inputs: Inputs, measure: Measure) -> tuple[int, ...]:
        layers, options = next(iter(self._modes.values())).layers, self._options
        num_layers, num_stages = len(layers.segments), self._transport.mesh.num_stages
        check_num_stages(num_layers, num_stages)
        if not isinstance(options.balance, str):
            return check_counts(options.balance, num_layers, num_stages)

        def by_costs() -> tuple[int, ...]:
            self.costs = self.costs or measure(layers)
            return self.costs.assign_layers(layers, num_stages, self._repeated(layers, inputs))

        if options.balance == "measured":
            if (len(self.preferred), sum(self.preferred)) == (num_stages, num_layers):
                return self.preferred
            if 1 < num_stages < num_layers:
                return self._transport.everyone.run_on_first(by_costs)  # equal in all replicas
        return solve_balance([1.0] * num_layers, num_stages)

    def _fill(self) -> None:
        for weights in self._weights if self._users else ():
            weights.fill(self._users)
