"""Fingerprints of a step's inputs, and of the data behind computed inputs.

The output of a trained encoder changes in each step because its weights do, but its data may stay
the same. Autograd saves most of the data that a function received:

    x = lin(features)                          features
    x = dropout(lin(features))                 features, the mask
    x = emb(ids) + label_emb(known labels)     ids, known labels
    x = cat([emb.weight, features])            features, which are a part of x
    x = emb.weight + noise                     nothing: the noise is hidden
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import saved_data, saved_options, shape_of_output, version_of
from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.graph import ContentNumbers, fold, sample_of, tensors_in, text_fingerprint
from lightning_gnnpipe.stages import Reads, is_traced_through
from lightning_gnnpipe.types import CrossChunkEdges

_CALL = "call in the step"
_LIBRARIES = ("torch.", "torch_geometric.")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
        return names + [name for name in before.parts if name not in self.parts]

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

    def __init__(
        self, module: nn.Module, contents: ContentNumbers, cross_edges: CrossChunkEdges
    ) -> None:
        self._contents, self._cross_edges = contents, cross_edges
        self._held = _ModuleTensors(module, contents)
        self._parts = _PartOptions(module, contents)
        self._owner: nn.Module = module
        self._random_state: Callable[[], Mapping[str, Any]] = dict
        self._before: Mapping[str, Any] | None = None
        self._needs_random = True
        self.num_random = 0

    def begin_step(self, owner: nn.Module, random_state: Callable[[], Mapping[str, Any]]) -> None:
        """Start a step of `owner`; `random_state` returns the state of all random streams."""
        self._owner, self._random_state = owner, random_state
        self._before = random_state() if self._needs_random else None

    def of(self, call: Call, inputs: Inputs, batch: Callable[[], int]) -> InputKey:
        """Return the key of a call on one graph."""
        self._needs_random = self._needs_random and not torch.is_grad_enabled()
        parts = {"option": text_fingerprint(repr((call.signature, self._cross_edges)))}
        names = tuple(f"'{name}'" for name in call.names)
        leaves: list[int | None] = []
        graph = [inputs.num_nodes, *inputs.edge_sizes]
        for slot, (kind, name) in enumerate(zip(inputs.kinds, names, strict=True)):
            leaf, is_weight = call.leaves[slot], slot in call.weights
            number = None if leaf.requires_grad or is_weight else self._contents.of(leaf)
            leaves.append(number)
            if is_weight:
                continue
            parts[name] = self._of_computed(leaf, batch) if number is None else number
            if kind is Kind.EDGE_INDEX:
                graph.append(parts[name])
        parts |= self._held.numbers()
        parts["option of a layer"] = self._parts.number()
        return InputKey(fold(graph), tuple(leaves), parts, names)

    def end_pass(self) -> None:
        """Accept changes by the forward itself, which are no new input."""
        self._held.accept()
        self._parts.accept()

    def _of_computed(self, leaf: Tensor, batch: Callable[[], int]) -> int:
        """Return a fingerprint of the data from which `leaf` was computed."""
        sources = find_sources(leaf)
        places = {id(one): place for place, one in enumerate(self._owner.parameters())}
        weights = [places.get(id(one), -1) for one in sources.weights]
        text = text_fingerprint(repr((leaf.dtype, list(leaf.shape), weights, sources.functions)))
        numbers = [text, *(self._contents.of(one) for one in sources.tensors)]
        if sources.is_hidden:
            self._needs_random = True
            numbers += [batch(), self._of_owner()]
            if self._before is None or not _is_equal(self._before, self._random_state()):
                self.num_random += 1  # random numbers drawn in this step
                numbers.append(self.num_random)
        return fold(numbers)

    def _of_owner(self) -> int:
        """Return a fingerprint of the user's module without weights."""
        inside = {id(one) for one in self._held.module.modules()}
        held: list[Any] = []
        for one in self._owner.modules():
            if id(one) not in inside:
                held += [v for n, v in vars(one).items() if n[:1] != "_" and n != "training"]
                held += one.buffers(recurse=False)
        numbers = [self._contents.of(one) for one in tensors_in(held) if _is_dense(one)]
        states = [one.get_state() for one in held if isinstance(one, torch.Generator)]
        numbers += [self._contents.of(one) for one in states]
        plain = [one for one in held if isinstance(one, bool | int | float | str)]
        return fold([*numbers, text_fingerprint(repr(plain))])


class _PartOptions:
    """Plain options of submodules that run untraced."""

    def __init__(self, module: nn.Module, contents: ContentNumbers) -> None:
        self._module, self._contents = module, contents
        self._modules: list[nn.Module] = []
        self._reads = Reads()
        self._values: tuple[Hashable, ...] | None = None
        self._number = 0

    def number(self) -> int:
        modules = list(self._module.modules())
        if len(modules) != len(self._modules) or any(map(is_not, modules, self._modules)):
            self._modules, self._values = modules, None
            self._reads = Reads.of_parts(self._module, is_traced_through)
        values = self._reads.values()
        if values != self._values:
            self._values = values
            plain = self._reads.plain(values, self._contents.of)
            self._number = text_fingerprint(repr(plain))
        return self._number

    def accept(self) -> None:
        """Keep the fingerprint despite new values: a forward may count its own calls."""
        if self._values is not None:
            self._values = self._reads.values()


class _ModuleTensors:
    """Tensors that a module holds besides weights; changes by its own forward do not count."""

    def __init__(self, module: nn.Module, contents: ContentNumbers) -> None:
        self.module, self._contents = module, contents
        self._held: dict[str, _Known] = {}
        self._own: set[str] = set()
        self._names: set[str] = set()  # before the forward
        self._made: set[str] = set()  # by a forward

    def numbers(self) -> dict[str, int]:
        before, self._held, found = self._held, {}, list(self._tensors())
        self._names = {name for name, *_ in found}
        for name, module, key, tensor in found:
            if key in _STATISTICS and self._is_norms_own(name, module):
                continue
            if name not in self._made and not tensor.requires_grad:
                known = before.get(name)
                if known is None or not known.is_as_it_was(tensor):
                    number = self._contents.of(tensor)
                    known = _Known(module, key, number)
                    known.accept(tensor)
                self._held[name] = known
        return {name: held.number for name, held in self._held.items()}

    def _tensors(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Yield the tensors that modules hold besides weights: name, module, attribute, tensor."""
        for prefix, module in self.module.named_modules():
            held = dict(module.named_buffers(recurse=False))
            if not type(module).__module__.startswith(_LIBRARIES):  # libraries keep results there
                held |= vars(module)
            for key, tensor in held.items():
                if isinstance(tensor, Tensor) and _is_dense(tensor):
                    yield f"'{prefix}.{key}' of the module".replace("'.", "'"), module, key, tensor

    def _is_norms_own(self, name: str, module: nn.Module) -> bool:
        """Whether the norm itself updates statistic `name` in training; kept in validation."""
        if torch.is_grad_enabled():
            (self._own.add if module.training else self._own.discard)(name)
        return name in self._own or module.training

    def accept(self) -> None:
        """Keep the fingerprints despite writes by the forward."""
        self._made |= {name for name, *_ in self._tensors()} - self._names
        for held in self._held.values():
            tensor = getattr(held.module, held.key, None)
            if isinstance(tensor, Tensor):
                held.accept(tensor)


class _Known:
    """A tensor attribute of a module, and its fingerprint at the last change from outside."""

    def __init__(self, module: nn.Module, key: str, number: int) -> None:
        self.module, self.key, self.number = module, key, number
        self._tensor: Tensor | None = None
        self._version, self._sample = -1, torch.empty(0)

    def accept(self, tensor: Tensor) -> None:
        """Record the present state of the tensor; later writes change its fingerprint."""
        if self._tensor is not tensor or self._version != version_of(tensor):
            self._tensor, self._version = tensor, version_of(tensor)
            self._sample = sample_of(tensor).clone()

    def is_as_it_was(self, tensor: Tensor) -> bool:
        is_same = self._tensor is tensor and self._version == version_of(tensor) >= 0
        return is_same and torch.equal(self._sample, sample_of(tensor))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return all(_is_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


_MOST_NODES = 5000
_SAVES_ALL = ("MulBackward", "DivBackward", "MmBackward", "BmmBackward")
"""Functions that save each operand without a gradient."""


@dataclass(slots=True)
class Sources:
    """The data behind a tensor; `is_hidden` if autograd has not saved all of it."""

    functions: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    is_hidden: bool = False


def find_sources(tensor: Tensor) -> Sources:
    """Return the data from which `tensor`, which needs a gradient, was computed."""
    found = Sources()
    if tensor.grad_fn is None:
        found.weights.append(tensor)
        return found
    nodes, seen = [tensor.grad_fn], {tensor.grad_fn}
    part = _hidden_part(tensor)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.weights.append(node.variable)
            continue
        own = saved_data(node)
        if node is tensor.grad_fn and part is not None:
            own.append(part)
        elif any(following is None for following, _ in node.next_functions):
            found.is_hidden |= not _is_all_saved(node, own)
        found.tensors += filter(_is_dense, own)
        found.is_hidden |= not all(map(_is_dense, own))
        found.functions.append(f"{node.name()} {saved_options(node)}")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
        if len(seen) > _MOST_NODES:
            found.is_hidden = True
            break
    return found


def _is_all_saved(node: Any, saved: list[Tensor]) -> bool:
    """Whether a function has saved all its operands that need no gradient."""
    name = node.name()
    if name.startswith("AddmmBackward"):  # operands: bias and two factors
        return node.next_functions[0][0] is not None and bool(saved)
    if "Norm" in name:  # a missing operand is an absent weight
        return True
    return name.startswith(_SAVES_ALL) and bool(saved)


def _hidden_part(tensor: Tensor) -> Tensor | None:
    """Return the part of a `cat` output without gradient; None unless there is one part."""
    node: Any = tensor.grad_fn
    operands = node.next_functions
    if not node.name().startswith("CatBackward") or sum(f is None for f, _ in operands) != 1:
        return None
    dim = saved_options(node).get("dim", 0) % tensor.dim()
    sizes = [None if f is None else shape_of_output(f, index)[dim] for f, index in operands]
    start = sum(size or 0 for size in sizes[: sizes.index(None)])
    length = tensor.size(dim) - sum(size or 0 for size in sizes)
    return tensor.detach().narrow(dim, start, length)
