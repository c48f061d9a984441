"""The user's module as a pipeline: traced once per mode, cut into layers, assigned to stages.

Every rank holds all parameters and buffers, as under DDP, and computes the layers of its stage.
With weights="staged" it holds only the parameters that its stage uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind, is_of_pairs
from lightning_gnnpipe.chunks import StepCosts, fit_memory
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import Fallbacks, UnsupportedError
from lightning_gnnpipe.graph import BatchPlan, ChunkPlan, check_graph, text_fingerprint
from lightning_gnnpipe.layers import find_layers, tracks_statistics, without_memory
from lightning_gnnpipe.methods import own_methods, raising_own_errors
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.passing import Matrices, replace_attributes
from lightning_gnnpipe.report import Split
from lightning_gnnpipe.stages import (
    OF_LIBRARY,
    OF_USERS,
    RATE,
    Guard,
    HeldTensors,
    Layers,
    Stage,
    State,
    check_counts,
    check_num_stages,
    choose_repeated,
    cut_module,
    find_reached,
    find_users,
    ids_in_stages,
    names_of_head,
    solve_balance,
    split_layers,
    switched,
)
from lightning_gnnpipe.steps.gradient_sums import GradientSums
from lightning_gnnpipe.steps.staged_weights import StagedWeights

log = logging.getLogger(__name__)

_NUM_MODES, _MANY_CHANGES = 8, 3
_OF_FOLDER = (
    "Rows of %s are in the order of the folder, not in yours. Fill and read rows of nodes by "
    "batch.n_id, and load them with this folder alone."
)
_TRACED_ANEW = (
    "Forward is traced anew each time that %s changes. To trace once, keep numbers that forward "
    "reads in a buffer and change it in place: self.scale.fill_(0.5). Keep what it does not read "
    "in a callback, in a metric of torchmetrics or in a collections.deque()."
)

Key = tuple[Hashable, State]  # see `_trace_key`
Check = Callable[[Layers, Call, Inputs], None]
Measure = Callable[[Layers], StepCosts]  # measures the layers of a new module
OnSplit = Callable[[Split, StepCosts | None, Inputs, ChunkPlan | BatchPlan], None]


@dataclass(frozen=True, slots=True)
class Mode:
    """One trace of the module, cut into layers and assigned to stages."""

    layers: Layers
    stages: tuple[Stage, ...]  # empty until the layers are assigned
    reads: Hashable  # modes with equal `reads` share histories
    is_training: bool
    options: int  # fingerprint of plain attributes that forward reads, and of weight shapes
    frozen: tuple[bool, ...]  # weights that need no gradient
    users: Mapping[str, set[int]] = field(default_factory=dict)  # stages of weights and buffers
    is_random: bool = False  # draws random numbers in evaluation
    unreached: dict[frozenset[str], frozenset[str]] = field(default_factory=dict)

    def without_gradient(self, module: nn.Module, outputs: Iterable[str]) -> frozenset[str]:
        """Return inputs and parameters that get no gradient from these `outputs`."""
        used = frozenset(outputs)
        if used not in self.unreached:
            names = {name for name, _ in module.named_parameters()}
            names |= {name for segment in self.layers.segments for name in segment.inputs}
            names |= set(self.layers.outputs)
            self.unreached[used] = frozenset(names - find_reached(self.layers, module, used))
        return self.unreached[used]

    def readers_of(self, call: Call) -> dict[int, list[int]]:
        """Return, by the number of each argument that needs a gradient, the stages that read it."""
        return {
            slot: [one.index for one in self.stages if f"leaf_{slot}" in one.leaves]
            for slot, leaf in enumerate(call.leaves)
            if leaf.requires_grad and slot not in call.weights
        }

    def finish(
        self,
        outputs: Sequence[Tensor],
        call: Call,
        seeded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """Return what the call returns; a head draws its random numbers `seeded`."""
        with seeded() if self.layers.head else nullcontext():
            return self.layers.rebuild_output(outputs, call.leaves)


class PipelinedModel:
    """The user's module, cut into stages.

    `check` refuses a new trace if chunks change the results.
    `is_cut` returns whether training may cut a graph into chunks or shards.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        options: RunOptions,
        check: Check,
        is_cut: Callable[[Inputs], bool],
    ) -> None:
        self.module, self.intercepted = module, find_layers(module)
        self.root = module  # what it is a part of, once known
        self._transport, self._options = transport, options
        self._check, self._is_cut, self._modes = check, is_cut, dict[Key, Mode]()
        self._num_changes, self._given = 0, dict[str, str]()  # the latter: plain arguments
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)
        self.on_split: OnSplit | None = None  # called once, in the first training step
        self.say: Callable[[str], None] = log.debug  # what the run does before its first step
        self.costs: StepCosts | None = None  # once measured
        self.stage_layers: tuple[int, ...] = ()  # number of layers of each stage, once assigned
        self.preferred: tuple[int, ...] = ()  # layers per stage, if they fit, not measured ones
        self._own: dict[tuple[int, ...], frozenset[int]] = {}  # see `of_stages_only`
        self._in_stages: dict[str, set[int]] = {}  # stages of each weight and buffer they use
        self._of_head: set[str] = set()  # weights that only the head uses, on every rank
        self.matrices = Matrices()  # sparse matrices among the arguments
        self._held, self._guard = HeldTensors(module), Guard(module)
        self.staged = StagedWeights(transport)  # the weights that only their stages hold
        self.is_due = False  # whether a rank has to trace the next call, so that all do
        self.is_new = False  # no pass has run since the last trace
        self.is_accumulating = False  # if so, replicas do not average gradients

    @property
    def is_split(self) -> bool:
        """Whether the layers have been assigned."""
        return bool(self.stage_layers)

    def attach(self, call: Call) -> Call:
        """Return the call with parameters and buffers with a row a node or edge as leaves."""
        found = call if call.has_graphs else self._held.attach(call)
        stored = self._options.stored
        if found.held and stored is not None:
            rows = [(name, found.leaves[slot].size(0)) for slot, name in found.held.items()]
            of_nodes = [name for name, number in rows if number == stored.plan.num_nodes]
            self._fallbacks.tell(_OF_FOLDER, ", ".join(of_nodes or found.held.values()))
        return found

    def mode(self, call: Call, inputs: Inputs, measure: Measure, *, also_train: bool) -> Mode:
        """Return the mode of these arguments; trace the module and assign layers if it is new.

        `measure` returns layer costs, once, on rank 0. With `also_train` the first call traces
        training mode too, which may use more parameters.
        """
        with own_methods(self.module):
            key = self._find(call, inputs)
            if key is None:
                self._note_change(call)
            if key is None or not self._modes[key].stages or self.is_due:
                self.is_due = False
                with self.staged.gathered():
                    key = self._trace_all(call, inputs, also_train=also_train)
                    self._assign_layers(inputs, measure)
        self._modes[key] = mode = self._modes.pop(key)  # now most recently used
        return mode

    def has_changed(self, call: Call, inputs: Inputs) -> bool:
        """Whether this rank, one of several, has no trace of the module as it is now."""
        return self._transport.has_others and self._find(call, inputs) is None

    def note_random(self, mode: Mode) -> None:
        """Remember that the mode draws random numbers in evaluation."""
        key = next(key for key, one in self._modes.items() if one is mode)
        self._modes[key] = replace(mode, is_random=True)

    def _find(self, call: Call, inputs: Inputs) -> Key | None:
        """Return the key of the trace for the module's present state, if there is one."""
        now = self._key(call, inputs)
        return next((key for key in reversed(self._modes) if key == now), None)

    def _key(self, call: Call, inputs: Inputs) -> Key:
        device = self._transport.world.device
        return _trace_key(self.module, call, inputs, device), self._guard.state()

    def _trace_all(self, call: Call, inputs: Inputs, *, also_train: bool) -> Key:
        if inputs.graphs is None and self._options.stored is None:
            check_graph(inputs.edge_index, inputs.num_nodes)
        self._trace(call, inputs)
        if also_train and not self.is_split:
            for training in (True, False):
                with switched(self.module, training), torch.set_grad_enabled(training):
                    self._trace(call, inputs)
        key = self._trace(call, inputs)  # maybe under a new key
        options = self._options_number(self._modes[key])  # collective
        for one in [one for one, mode in self._modes.items() if not mode.options or one == key]:
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
        self.is_new = True
        return key

    def end_pass(self) -> None:
        """Leave attributes that the first pass of a trace has changed, such as counters, alone."""
        self.is_new = False
        if self._modes:
            before = next(reversed(self._modes))[1]
            counters = set(self._guard.state().changed(before, OF_LIBRARY, OF_USERS, RATE))
            if counters:
                self._guard.leave(counters)
                modes = self._modes.items()
                self._modes = {(call, s.without(counters)): mode for (call, s), mode in modes}

    def _options_number(self, mode: Mode) -> int:
        """Return rank 0's number of the attributes and weight shapes that `mode` was made for."""
        shapes = [(tuple(p.shape), p.dtype) for p in self.module.parameters()]
        own = mode.options or text_fingerprint(repr((self._guard.state().text, shapes)))
        return self._transport.broadcast_object(own)  # some options differ between processes

    def gradient_sums(self, mode: Mode) -> GradientSums:
        """Return the sums for one pass in `mode`."""
        users = mode.users.items()  # every rank has the gradients of the head
        of_stages = {name: one for name, one in users if name not in self._of_head}
        return GradientSums(self.module, of_stages, self._transport, self.staged)

    def _assign_weights(self, root: nn.Module) -> None:
        """Let stages hold their weights, but not arguments of layers or parts used outside."""
        named, own = dict(self.module.named_parameters()), self.of_stages_only(root)
        leaves = {name for mode in self._modes.values() for name in mode.layers.weights.values()}
        inside = set(self.module.modules()) - {self.module}
        outer = set(root.modules()) - inside - {self.module}
        parts = (part for one in outer for part in one.children() if part in inside)
        own -= {id(p) for part in parts for p in part.parameters()}
        users = self._in_stages.items()
        held = {named[n]: stages for n, stages in users if n in named and n not in leaves}
        self.staged.assign({p: stages for p, stages in held.items() if id(p) in own})
        self._held.left_out = self.staged.stages

    def of_stages_only(self, root: nn.Module) -> frozenset[int]:
        """Return ids of the parameters that neither the head nor other modules of `root` use."""
        key = tuple(map(id, root.parameters()))
        if key not in self._own:
            layers = [mode.layers for mode in self._modes.values()]
            found = ids_in_stages(self.module, root, self._in_stages, layers)
            self._own = {key: frozenset(found)}
        return self._own[key]

    def share_statistics(self, *, replaced: bool) -> None:
        """Send running statistics that a pass has updated, or `replaced`, to all ranks; collective.

        The stage that runs a norm updates them. So are other buffers that layers write, as power
        iterations do.
        """
        if not self._transport.world.is_distributed:
            return
        by_stage: dict[int, list[Tensor]] = {}
        for name, norm in (self.intercepted.norms | self.intercepted.batch_norms).items():
            stages = self._in_stages.get(f"{name}.running_mean")
            if stages and (tracks_statistics(norm) or replaced):
                by_stage.setdefault(min(stages), []).extend(norm.buffers())
        buffers = dict(self.module.named_buffers())
        for name in sorted(self._written() & buffers.keys()):
            by_stage.setdefault(min(self._in_stages[name]), []).append(buffers[name])
        self._transport.share_of_stages(by_stage)

    def _written(self) -> set[str]:
        """Return names of the stages' buffers that layers write, without statistics of norms."""
        names = {name for mode in self._modes.values() for name in mode.layers.written}
        norms = tuple(f"{one}." for one in self.intercepted.norms | self.intercepted.batch_norms)
        return {one for one in names & self._in_stages.keys() if not one.startswith(norms)}

    def _note_change(self, call: Call) -> None:
        """Warn once if attributes or plain arguments change often, at a trace each."""
        before, self._given = self._given, {n: repr(value) for n, value in call.options.items()}
        given = [n for n, text in self._given.items() if before.get(n, text) != text]
        changed = [f"its argument '{name}'" for name in given]
        if self.is_split:
            found = self._guard.state().changed(next(reversed(self._modes))[1])
            changed += [f"{path}.{name}".removeprefix(".") for path, name in found]
        self._num_changes += bool(changed)
        if changed and self._num_changes == _MANY_CHANGES:
            self._fallbacks.tell(_TRACED_ANEW, ", ".join(changed))

    def _trace(self, call: Call, inputs: Inputs) -> Key:
        """Trace the module in its present mode, unless cached."""
        if (found := self._find(call, inputs)) is not None:
            return found
        _check_parameters(self.module)
        first, state = self._key(call, inputs)
        known = {
            id(mode.layers): key
            for key, mode in self._modes.items()
            if key[0] == first and key[1].parts == state.parts
        }
        self.intercepted, records = find_layers(self.module), torch.is_grad_enabled()
        with (
            without_memory(self.intercepted.convs),
            torch.inference_mode(False),
            raising_own_errors(self.module, call, inputs),
        ):
            for p in self.module.parameters():
                if p.is_inference():  # set in predict: p.data = ...
                    p.data = p.data.clone()
            layers = cut_module(
                self.module,
                call,
                inputs,
                self.intercepted.all,
                finds_repeatable=bool(self._options.given.repeat_encoder),
                is_grad_enabled=records,
                is_cut=inputs.graphs is not None or self._is_cut(inputs),
                is_shared=self._transport.has_others,
                known=[self._modes[key].layers for key in known.values()],
            )
            before = known.get(id(layers))
            if before is None or state.changed(before[1], OF_USERS):
                with torch.set_grad_enabled(records):
                    self._check(layers, call, inputs)
        called = (self.module,) if layers.head is None else layers.called(self.module)
        self.intercepted = self.intercepted.within(called)
        key = self._key(call, inputs)
        if before is not None:  # other attributes, the same operations
            is_same = not state.changed(before[1], OF_LIBRARY, OF_USERS)
            mode = self._modes.pop(before)
            self._modes[key] = mode if is_same else replace(mode, options=0)
            return key
        flags = tuple(norm.training for norm in self.intercepted.norms.values())
        needed = tuple(p.requires_grad for p in self.module.parameters())
        reads = flags, needed, tuple(leaf.requires_grad for leaf in call.leaves)
        frozen = tuple(not one for one in needed)
        self._modes[key] = Mode(layers, (), reads, self.module.training, 0, frozen)
        return key

    def _assign_layers(self, inputs: Inputs, measure: Measure) -> None:
        is_first_time = not self.is_split
        if is_first_time:
            self.stage_layers = self._count_layers(inputs, measure)
        counts, users = self.stage_layers, dict(self._in_stages)
        every = set(range(self._transport.mesh.num_stages))
        modes = sorted(self._modes.items(), key=lambda item: not item[1].is_training)
        for key, mode in modes:
            if not mode.stages:
                repeated = self._repeated(mode.layers, inputs)
                mode = replace(mode, stages=split_layers(mode.layers, counts, repeated))
                self._modes[key] = mode
            of_head = dict.fromkeys(names_of_head(mode.layers, self.module), every)
            self._of_head |= of_head.keys()
            own = find_users(mode.stages, self.module)
            for name, stages in own.items():
                users[name] = users.get(name, set()) | stages
            self._modes[key] = replace(mode, users=own | of_head)
        users |= dict.fromkeys(self._of_head & users.keys(), every)
        self._of_head -= users.keys()
        self._in_stages, self._own = dict(sorted(users.items())), {}
        found = self.intercepted
        _check_norms(found.norms | found.batch_norms, self._in_stages)
        for name in self._written():
            if len(self._in_stages[name]) > 1:
                raise UnsupportedError(
                    f"Several stages change the buffer '{name}', each by itself.\n"
                    "Give each layer a part of its own, or train with devices=1."
                )
        if is_first_time:
            self._tell_idle(self._modes[modes[0][0]].stages, inputs)
        if self.staged.root is not None:
            self._assign_weights(self.staged.root)
        while len(self._modes) > _NUM_MODES:
            del self._modes[next(iter(self._modes))]

    def _repeated(self, layers: Layers, inputs: Inputs) -> Sequence[str]:
        num_shards = self._transport.mesh.num_shards
        return choose_repeated(
            layers, self._options.given.repeat_encoder, inputs.num_rows, num_shards
        )

    def tell_split(self, mode: Mode, inputs: Inputs, plan: ChunkPlan | BatchPlan) -> None:
        """Pass the stages to `on_split`, once."""
        on_split, self.on_split = self.on_split, None
        if on_split is not None:
            num_shards, layers = self._transport.mesh.num_shards, mode.layers
            users = find_users([s for one in self._modes.values() for s in one.stages], self.module)
            split = Split(self.module, layers, mode.stages, users, num_shards, inputs.num_rows)
            on_split(split, self.costs, inputs, plan)

    def _tell_idle(self, stages: Sequence[Stage], inputs: Inputs) -> None:
        is_idle = self._options.given.repeat_encoder is True and not any(s.repeated for s in stages)
        if is_idle and len(stages) > 1:
            why = "mixes rows" if inputs.graphs is None else "is of a batch of graphs"
            self._fallbacks.tell(
                f"repeat_encoder=True has no effect, since what stages receive {why}."
            )

    def _count_layers(self, inputs: Inputs, measure: Measure) -> tuple[int, ...]:
        mode = next(iter(self._modes.values()))
        if not torch.is_grad_enabled():  # a validation comes first
            mode = min(self._modes.values(), key=lambda one: not one.is_training)
        layers, balance = mode.layers, self._options.given.balance
        num_layers, num_stages = len(layers.segments), self._transport.mesh.num_stages
        check_num_stages(num_layers, num_stages)
        run, counts = self._options, None
        is_known = (len(self.preferred), sum(self.preferred)) == (num_stages, num_layers)
        if not isinstance(balance, str):
            counts = check_counts(balance, num_layers, num_stages)
        elif balance == "measured" and run.is_fitting and is_known:
            counts = self.preferred
        elif balance == "uniform" or not (run.is_fitting and run.measures(num_layers)):
            counts = solve_balance([1.0] * num_layers, num_stages)
        fits = run.is_fitting and run.given.memory_gib is not None and inputs.graphs is None
        if counts is not None and not fits:
            return counts

        def by_costs() -> tuple[tuple[int, ...], dict[str, Any], int | None, str]:
            if self.costs is None:
                self.say("Timing its layers ...")
                norms = self.intercepted.batch_norms.values() if inputs.graphs is not None else ()
                with ExitStack() as stack:
                    if mode.is_training != self.module.training:
                        stack.enter_context(switched(self.module, mode.is_training))
                    for norm in norms:  # a micro-batch may have one graph
                        stack.enter_context(replace_attributes(norm, {"training": False}))
                    self.costs = measure(layers)
            costs = self.costs
            repeated = self._repeated(layers, inputs)
            found = counts or costs.assign_layers(layers, num_stages, repeated)
            saved, chosen, memory = {}, run.chosen, ""
            if fits:
                (options, number), memory = fit_memory(
                    self.root, self.module, layers, found, repeated, costs, run
                )
                saved = options.saved_beside(run.given)
                chosen = number if run.cut.has_free_chunks else chosen
            elif inputs.graphs is None and run.measures_chunks(num_layers):
                stages = split_layers(layers, found, repeated)
                chosen = costs.choose_num_chunks(stages, inputs.num_nodes)
            return found, saved, chosen, memory

        # Equal in all replicas.
        settled = self._transport.everyone.run_on_first(by_costs)
        found, saved, run.chosen, run.memory = settled
        run.given = replace(run.given, **saved)
        run.open(run.stored)
        return found


def _trace_key(module: nn.Module, call: Call, inputs: Inputs, device: torch.device) -> Hashable:
    """Cache key of a trace; attributes are in `State`."""
    flags = tuple([m.training for m in module.modules()])
    weights = tuple(
        [(name, p.requires_grad, p.is_leaf, p.dtype) for name, p in module.named_parameters()]
    )
    leaves = tuple(
        (leaf.requires_grad, leaf.dtype, _row_shape(call, inputs, slot, leaf))
        for slot, leaf in enumerate(call.leaves)
    )
    form = None if inputs.graphs is None else inputs.graphs.form
    is_autocast = torch.is_autocast_enabled(device.type)
    signature = (call.signature, inputs.edge_sets, form)
    return flags, weights, leaves, signature, is_autocast


def _row_shape(call: Call, inputs: Inputs, slot: int, leaf: Tensor) -> tuple[int, ...]:
    """Return the shape of a leaf without its row dimension, as a trace sees it."""
    if inputs.graphs is None:
        is_cut = inputs.kinds[slot] is Kind.EDGE_INDEX or is_of_pairs(call.names[slot])
        return () if is_cut else tuple(leaf.shape[1:])
    shape = list(leaf.shape)
    how = inputs.graphs.leaves[slot]
    if how.kind is not Kind.WHOLE:
        shape[how.dim] = -1
    return tuple(shape)


def _check_parameters(module: nn.Module) -> None:
    """Refuse computed tensors as weights: gradients would end at them."""
    computed = (name for name, parameter in module.named_parameters() if not parameter.is_leaf)
    name = next(computed, None) if torch.is_grad_enabled() else None
    if name is not None:
        raise UnsupportedError(
            expected="the weights of the pipelined module to be parameters",
            found=f"a computed tensor as '{name}', for example from functional_call",
            remedy="Call the module in torch.no_grad(), or call a copy of it that you make in "
            "__init__.",
        )


def stages_of_norms(
    norms: Mapping[str, nn.Module], users: Mapping[str, set[int]]
) -> dict[str, set[int]]:
    """Return the stages of norms whose running statistics several stages would update."""
    found = {name: users.get(f"{name}.running_mean", set()) for name in norms}
    return {name: stages for name, stages in found.items() if len(stages) > 1}


def _check_norms(norms: Mapping[str, nn.Module], users: Mapping[str, set[int]]) -> None:
    """Refuse running statistics that several stages would update independently."""
    for name, stages in stages_of_norms(norms, users).items():
        raise UnsupportedError(
            expected="a norm with running statistics to be called by one stage",
            found=f"'{name}', a {type(norms[name]).__name__}, in stages {sorted(stages)}",
            remedy="Give each layer a norm of its own.",
        )
