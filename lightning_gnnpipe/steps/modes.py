"""Modes of the module: one trace, cut into layers and stages, per way of calling it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind, is_of_pairs
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages import Layers, Stage, State, find_reached

Key = tuple[Hashable, State]  # see `trace_key`


@dataclass(frozen=True, slots=True)
class Mode:
    """One trace of the module, cut into layers and assigned to stages."""

    layers: Layers
    stages: tuple[Stage, ...]  # empty until the layers are assigned
    reads: Hashable  # modes with equal `reads` share histories
    is_training: bool
    options: int  # fingerprint of plain attributes that forward reads, and of weight shapes
    frozen: tuple[bool, ...]  # weights that need no gradient
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


def trace_key(module: nn.Module, call: Call, inputs: Inputs, device: torch.device) -> Hashable:
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


def reads_key(module: nn.Module, call: Call, norms: Iterable[nn.Module]) -> Hashable:
    """Return `Mode.reads`: norm modes, frozen weights, and leaves with gradients."""
    flags = tuple(norm.training for norm in norms)
    frozen = tuple(p.requires_grad for p in module.parameters())
    return flags, frozen, tuple(leaf.requires_grad for leaf in call.leaves)


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


def check_parameters(module: nn.Module) -> None:
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


def check_norms(norms: Mapping[str, nn.Module], users: Mapping[str, set[int]]) -> None:
    """Refuse running statistics that several stages would update independently."""
    for name, stages in stages_of_norms(norms, users).items():
        raise UnsupportedError(
            expected="a norm with running statistics to be called by one stage",
            found=f"'{name}', a {type(norms[name]).__name__}, in stages {sorted(stages)}",
            remedy="Give each layer a norm of its own.",
        )
