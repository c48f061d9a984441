"""What tells the inputs of two training steps apart.

Historical embeddings are read only by a step on the input that they were computed from. An input is
a graph, the tensors that reach the pipelined module, and what the module holds beside its weights:

    x = data.x                          its content, hashed again only after a write
    x = encoder(data.x)                 the batch, and the state of the outer module
    x = encoder(dropout(data.x))        new in each step, since random numbers were drawn in it
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data.data import BaseData

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.graph import ContentNumbers, fold, tensors_in, text_fingerprint

_CALL = "call in the step"
FLOAT = ", a float"  # end of the name of such a part
_LIBRARIES = ("torch.", "torch_geometric.", "torchmetrics.")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class InputKey:
    """Fingerprints of one call's inputs; `leaves` has None for computed tensors."""

    graph: int
    leaves: tuple[int | None, ...]
    parts: dict[str, int]
    names: tuple[str, ...]

    @property
    def number(self) -> int:
        """Fingerprint of all parts; unique if hidden random numbers enter."""
        return fold(self.parts.values())

    @property
    def call(self) -> int:
        """How many passes of the step await their backward: histories belong to one of them."""
        return self.parts.get(_CALL, 0)

    def at_call(self, call: int) -> InputKey:
        """Return the key of the same inputs in another call of the step."""
        return replace(self, parts=self.parts | {_CALL: call}) if call else self

    def changed(self, before: InputKey) -> list[str]:
        """Return the names of the parts that differ from `before`."""
        names = [name for name, number in self.parts.items() if before.parts.get(name) != number]
        names += [name for name in before.parts if name not in self.parts]
        # All plain arguments are in "option" as well.
        return [name for name in names if name != "option"] or names

    def reading(self, leaves: Collection[int], options: int, agreed: int) -> InputKey:
        """Return the key of the tensors in slots `leaves` and the `options` that the forward reads.

        Ranks may compute tensors that differ in their last bits; then `agreed` replaces all parts.
        """
        unread = {name for slot, name in enumerate(self.names) if slot not in leaves}
        parts = {name: number for name, number in self.parts.items() if name not in unread}
        if agreed != self.number:
            parts = {"input": agreed}
        parts["option of the module"] = options
        return replace(self, parts=parts).at_call(self.call)


class InputIdentity:
    """Computes the `InputKey` of each call; `num_random` counts randomly drawn inputs."""

    def __init__(self, module: nn.Module, contents: ContentNumbers) -> None:
        self._module, self._contents = module, contents
        self._held = _ModuleTensors(module, contents)
        self._owner: nn.Module = module
        self._random_number: Callable[[], int] = int
        self._before: int | None = None
        self._is_first, self._has_trained = True, False  # step; inputs that need gradients
        self.num_random = 0

    def begin_step(self, owner: nn.Module, random_number: Callable[[], int]) -> None:
        """Start a step of `owner`; `random_number`: a fingerprint of all random streams."""
        self._owner, self._random_number = owner, random_number
        self._before = random_number() if self._is_first or self._has_trained else None
        self._is_first = False

    def of(self, call: Call, inputs: Inputs, batch: Callable[[], int]) -> InputKey:
        """Return the key of a call on one graph; `batch` returns a fingerprint of the batch."""
        parts = {
            f"'{name}'" + (FLOAT if isinstance(one, float) else ""): text_fingerprint(repr(one))
            for name, one in call.options.items()
        }
        parts["option"] = text_fingerprint(repr(call.signature))
        names = tuple(f"'{name}'" for name in call.names)
        leaves: list[int | None] = []
        graph = [inputs.num_nodes, *inputs.edge_sizes]
        for slot, (kind, name) in enumerate(zip(inputs.kinds, names, strict=True)):
            leaf, is_weight = call.leaves[slot], slot in call.weights
            number = None if leaf.requires_grad or is_weight else self._contents.of(leaf)
            leaves.append(number)
            if is_weight:
                continue
            parts[name] = self._of_trained(leaf, batch) if number is None else number
            if kind is Kind.EDGE_INDEX:
                graph.append(parts[name])
        parts |= self._held.numbers()
        return InputKey(fold(graph), tuple(leaves), parts, names)

    def end_pass(self) -> None:
        """Accept changes by the forward itself, which are no new input."""
        self._held.accept()

    def _of_trained(self, leaf: Tensor, batch: Callable[[], int]) -> int:
        """Return a fingerprint of what `leaf`, which needs a gradient, was computed from."""
        text = text_fingerprint(repr((leaf.dtype, list(leaf.shape))))
        if leaf.is_leaf:
            places = enumerate(self._owner.parameters())
            place = next((place for place, one in places if one is leaf), None)
            return fold([text, self._contents.of(leaf) if place is None else place])
        numbers, self._has_trained = [text, batch(), self._of_owner()], True
        if self._before is None or self._before != self._random_number():
            self.num_random += 1
            numbers.append(self.num_random)
        return fold(numbers)

    def _of_owner(self) -> int:
        """Return a fingerprint of the user's module without weights and statistics of norms."""
        inside, held = {id(one) for one in self._module.modules()}, list[Any]()
        for one in self._owner.modules():
            if id(one) not in inside:
                held += (_buffers(one) | _attributes(one)).values()
        numbers = [self._of_value(one) for one in held]
        return fold(number for several in numbers for number in several)

    def _of_value(self, value: Any) -> list[int]:
        """Return fingerprints of a tensor, a graph, a random stream or a plain value."""
        if isinstance(value, torch.Generator):
            value = value.get_state()
        elif isinstance(value, np.random.Generator):
            value = repr(value.bit_generator.state)
        elif isinstance(value, random.Random):
            value = repr(value.getstate())
        if isinstance(value, _PLAIN):
            return [text_fingerprint(repr(value))]
        if not isinstance(value, Tensor | BaseData):
            return []
        found = [one for one in tensors_in(value) if not one.requires_grad and _is_dense(one)]
        return [self._contents.of(one) for one in found]


def _buffers(module: nn.Module) -> dict[str, Any]:
    """Return buffers other than statistics, which a norm updates in each step."""
    found = module.named_buffers(recurse=False)
    return {name: one for name, one in found if name not in _STATISTICS}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that user code has set; of modules of libraries, none."""
    if f"{type(module).__module__}.".startswith(_LIBRARIES):
        return {}
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


class _ModuleTensors:
    """Tensors that a module holds besides weights; changes by its own forward do not count."""

    def __init__(self, module: nn.Module, contents: ContentNumbers) -> None:
        self._module, self._contents = module, contents
        self._numbers: dict[str, int] = {}
        self._after: dict[str, int] = {}  # contents at the end of the last forward
        self._made: set[str] = set()  # by a forward
        self._own: set[str] = set()

    def numbers(self) -> dict[str, int]:
        """Return a fingerprint of each tensor, by name."""
        before, self._numbers = self._numbers, {}
        for name, tensor in self._tensors():
            if name not in self._made:
                now = self._contents.of(tensor)
                is_same = name in before and self._after.get(name) == now
                self._numbers[name] = before[name] if is_same else now
        return self._numbers

    def accept(self) -> None:
        """Keep the fingerprints despite writes by the forward."""
        found = dict(self._tensors())
        self._made |= found.keys() - self._numbers.keys()
        kept = self._numbers.keys() & found.keys()
        self._after = {name: self._contents.of(found[name]) for name in kept}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self._module.named_modules():
            is_library = f"{type(module).__module__}.".startswith(_LIBRARIES)
            attributes = () if is_library else vars(module).items()
            for key, tensor in (*module.named_buffers(recurse=False), *attributes):
                if not isinstance(tensor, Tensor) or tensor.requires_grad or not _is_dense(tensor):
                    continue
                name = f"'{prefix}.{key}' of the module".replace("'.", "'")
                if key not in _STATISTICS or not self._is_norms_own(name, module):
                    yield name, tensor

    def _is_norms_own(self, name: str, module: nn.Module) -> bool:
        """Whether the norm itself updates statistic `name` in training; kept in validation."""
        if torch.is_grad_enabled():
            (self._own.add if module.training else self._own.discard)(name)
        return name in self._own or module.training


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided
