"""The user's module as a pipeline: traced once for each mode, cut, dealt out to stages.

The weights of other stages are emptied. The cut is decided at the first call, when the arguments
are known. Until then every rank holds all parameters, so checkpoints load and optimizers are built
as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.gradients import GradientSums
from lightning_gnnpipe.engine.norms import check_norms
from lightning_gnnpipe.engine.switch import own_forward, switched
from lightning_gnnpipe.engine.weights import StageWeights
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing import find_layers, without_memory
from lightning_gnnpipe.stages import (
    Call,
    Inputs,
    Kind,
    Layers,
    Stage,
    check_counts,
    cut_layers,
    draw_sample,
    find_users,
    learn_values,
    solve_balance,
    split_layers,
    trace,
    traced_options,
)

_NUM_MODES = 8
_OF_GRAPHS = (Kind.NODE, Kind.EDGE, Kind.GRAPH, Kind.FILLED)  # what outputs may have rows of

Balance = Literal["measured", "uniform"] | Sequence[int]
Check = Callable[[Layers, Call, Inputs], None]
Measure = Callable[[Layers], list[float]]
OnSplit = Callable[[Sequence[Stage], dict[str, set[int]], list[float]], None]


@dataclass(frozen=True, slots=True)
class Mode:
    """A traced graph, cut into layers and dealt out to stages.

    Attributes:
        layers: The layers.
        stages: The stages, once the layers are dealt out.
        reads: What decides which histories are read: modes with the same share them.
    """

    layers: Layers
    stages: tuple[Stage, ...]
    reads: Hashable


class PipelinedModel:
    """One module on the mesh.

    Args:
        module: The user's module; its `forward` must be its own.
        transport: The ranks.
        balance: How layers are dealt out.
        check: Called with each new trace while all parameters are here; raises if it is not right
            on chunks.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, balance: Balance, check: Check
    ) -> None:
        self.module = module
        self.intercepted = find_layers(module)
        self._transport = transport
        self._balance = balance
        self._check = check
        self._modes: dict[object, Mode] = {}
        self.on_split: OnSplit | None = None  # is told stages, users of parameters, layer costs
        self.costs: list[float] = []  # of the layers, where they have been measured
        self._counts: tuple[int, ...] | None = None
        self._preferred: tuple[int, ...] = ()
        self._users: dict[str, set[int]] = {}
        self._weights = StageWeights(module, transport)
        self._copies: list[StageWeights] = []

    @property
    def is_split(self) -> bool:
        """Whether the layers have been dealt out."""
        return self._counts is not None

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage; empty before they are dealt out."""
        return self._counts or ()

    def prefer(self, stage_layers: tuple[int, ...]) -> None:
        """Deal the layers out like this rather than measure them, where it fits."""
        self._preferred = stage_layers

    @property
    def owned(self) -> set[str]:
        """Names of the parameters that count as this stage's; the first stage owns tied ones."""
        stage = self._transport.mesh.stage
        return {name for name, users in self._users.items() if min(users) == stage}

    @property
    def pipelined(self) -> set[str]:
        """Names of all parameters and buffers that belong to some stage."""
        return set(self._users)

    def mode(self, call: Call, inputs: Inputs, measure: Measure, *, also_train: bool) -> Mode:
        """Return the stages for the module's present mode and these arguments, traced if new.

        Args:
            call: The arguments.
            inputs: Their kinds.
            measure: Returns the cost of each layer; called on rank 0, once, for
                `balance="measured"`.
            also_train: At the first call, trace the training mode as well, since parameters may be
                used there only.
        """
        key = self._key(call, inputs)
        if key not in self._modes or not self._modes[key].stages:
            with self.whole():
                self.trace(call, inputs, also_train=also_train)
                self._deal_out(measure)
        return self._modes[key]

    def trace(self, call: Call, inputs: Inputs, *, also_train: bool) -> Layers:
        """Return the layers of the module's present mode, while all parameters are here.

        For the arguments see `mode`.

        Raises:
            UnsupportedError: If they are not the same in all modes.
        """
        self._trace(call, inputs)
        if also_train and self._counts is None:
            for training in (True, False):
                with switched(self.module, training):
                    self._trace(call, inputs)
        lengths = {len(mode.layers.segments) for mode in self._modes.values()}
        if len(lengths) > 1:
            raise UnsupportedError(
                explain(
                    expected="the forward to run the same layers in training and in evaluation",
                    found=f"{sorted(lengths)} layers",
                    remedy="Call the same message-passing layers in both modes.",
                )
            )
        return self._modes[self._key(call, inputs)].layers

    def add_copy(self, module: nn.Module) -> StageWeights:
        """Empty and fill `module`, a copy of the pipelined one, along with it; return its weights.

        All ranks must add the same copies, in the same order, before the first call.
        """
        assert not self.is_split
        self._copies.append(StageWeights(module, self._transport))
        return self._copies[-1]

    def husks(self) -> list[nn.Parameter]:
        """Return the parameters whose data is on other ranks."""
        return self._weights.husks()

    def complete(
        self, state: dict[str, Tensor], prefix: str, weights: StageWeights | None = None
    ) -> None:
        """Put the weights of all stages, or those of a copy, into this rank's state dict.

        See `StageWeights.complete`.
        """
        (weights or self._weights).complete(state, prefix, self._users)

    def restore(self) -> None:
        """Give every rank all parameters back, and forget the split."""
        self._fill()
        self.forget()

    def forget(self) -> None:
        """Forget the split without talking to other ranks."""
        self._modes.clear()
        self._counts, self._users = None, {}
        for weights in (self._weights, *self._copies):
            weights.forget()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have all parameters within the block, and only this stage's after it; collective."""
        self._fill()
        yield
        for weights in (self._weights, *self._copies):
            weights.empty(self._users)

    def begin_backward(self) -> GradientSums:
        """Return the sums of gradients over the ranks that share parameters."""
        return GradientSums(self.module, self._users, self._transport, self._weights.shape_of)

    def _key(self, call: Call, inputs: Inputs) -> object:
        """Return what a trace depends on: modes, options, frozen weights, shapes of rows."""
        flags = tuple(m.training for m in self.module.modules())
        options = tuple(traced_options(self.module))
        frozen = tuple(p.requires_grad for p in self.module.parameters())
        leaves = tuple(
            (leaf.requires_grad, leaf.dtype, _row_shape(inputs, slot, leaf))
            for slot, leaf in enumerate(call.leaves)
        )
        form = None if inputs.graphs is None else inputs.graphs.form
        is_autocast = torch.is_autocast_enabled(self._transport.world.device.type)
        signature = (call.signature, inputs.edge_sets, form)
        return flags, options, frozen, leaves, signature, is_autocast

    def _reads(self, call: Call) -> Hashable:
        """Return what changes which rows and statistics are read, other than plain options."""
        flags = tuple(norm.training for norm in self.intercepted.norms.values())
        frozen = tuple(p.requires_grad for p in self.module.parameters())
        return flags, frozen, tuple(leaf.requires_grad for leaf in call.leaves)

    def _trace(self, call: Call, inputs: Inputs) -> None:
        key = self._key(call, inputs)
        if key in self._modes:
            return
        with (
            own_forward(self.module),
            without_memory(self.intercepted.convs),
            torch.inference_mode(False),
        ):
            graph = trace(self.module, call)
            sample = draw_sample(self.module, call, inputs)
            kinds = (Kind.NODE,) if inputs.graphs is None else _OF_GRAPHS
            values = learn_values(graph, self.module, sample)
            layers = cut_layers(graph, self.module, values, kinds)
            self._check(layers, call, inputs)
        self._modes[key] = Mode(layers, (), self._reads(call))

    def _deal_out(self, measure: Measure) -> None:
        is_first_time = self._counts is None
        if self._counts is None:
            self._counts = self._count_layers(measure)
        self._modes = {
            key: mode
            if mode.stages
            else replace(mode, stages=split_layers(mode.layers, self._counts))
            for key, mode in self._modes.items()
        }
        users = self._users
        for mode in self._modes.values():
            for name, stages in find_users(mode.stages, self.module).items():
                users.setdefault(name, set()).update(stages)
        self._users = {name: users[name] for name in sorted(users)}
        found = self.intercepted
        check_norms(found.norms | found.batch_norms, self._users)
        if is_first_time and self.on_split is not None:
            self.on_split(next(iter(self._modes.values())).stages, self._users, self.costs)
        while len(self._modes) > _NUM_MODES:
            del self._modes[next(iter(self._modes))]

    def _count_layers(self, measure: Measure) -> tuple[int, ...]:
        layers = next(iter(self._modes.values())).layers
        num_layers, num_stages = len(layers.segments), self._transport.mesh.num_stages
        if not isinstance(self._balance, str):
            return check_counts(self._balance, num_layers, num_stages)
        costs = [1.0] * num_layers
        counts = solve_balance(costs, num_stages)
        fits = (len(self._preferred), sum(self._preferred)) == (num_stages, num_layers)
        if self._balance == "measured" and fits:
            return self._preferred
        if self._balance == "measured" and 1 < num_stages < num_layers:
            if self._transport.world.is_root:
                self.costs = self.costs or measure(layers)
                counts = solve_balance(self.costs, num_stages)
            counts = self._transport.broadcast_object(counts)
        return counts

    def _fill(self) -> None:
        if self._users:
            for weights in (self._weights, *self._copies):
                weights.fill(self._users)


def _row_shape(inputs: Inputs, slot: int, leaf: Tensor) -> tuple[int, ...]:
    """Return the shape of a leaf but for the dimension of its rows, as far as a trace sees it."""
    if inputs.graphs is None:
        return () if inputs.kinds[slot] is Kind.EDGE_INDEX else tuple(leaf.shape[1:])
    shape = list(leaf.shape)
    how = inputs.graphs.leaves[slot]
    if how.kind is not Kind.WHOLE:
        shape[how.dim] = -1
    return tuple(shape)
