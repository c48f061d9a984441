"""What the pipelined module is given in a step, as numbers to compare with those of other steps.

Rows of neighbours that are read from an earlier step have to be made of the same input. Tensors are
compared by content. Of those that trained weights have computed, the data behind them are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.engine.contents import ContentNumbers
from lightning_gnnpipe.engine.sources import find_sources
from lightning_gnnpipe.graph import fold, text_fingerprint
from lightning_gnnpipe.stages import Call, Inputs, Kind
from lightning_gnnpipe.types import CrossChunkEdges


@dataclass(frozen=True, slots=True)
class InputKey:
    """What one call is given.

    Attributes:
        graph: Number of its edges.
        leaves: Numbers of the call's tensors; None where weights have computed one.
        parts: By name, the numbers of all that it is given.
        names: Of the call's tensors, as in `parts`.
    """

    graph: int
    leaves: tuple[int | None, ...]
    parts: dict[str, int]
    names: tuple[str, ...]

    @property
    def number(self) -> int:
        """Of all parts together; unique where random numbers cannot be known."""
        return fold(self.parts.values())

    def changed(self, before: InputKey) -> list[str]:
        """Return the names of what is another than `before`."""
        names = [name for name, number in self.parts.items() if before.parts.get(name) != number]
        return names + [name for name in before.parts if name not in self.parts]

    def reading(self, leaves: Collection[int], options: int, agreed: int) -> InputKey:
        """Return the key without what the forward does not read, with what it reads elsewhere.

        Args:
            leaves: Numbers of the tensors that it reads.
            options: Number of the plain values that it reads off the module.
            agreed: What the ranks have agreed on for `number`. Tensors that they have computed may
                differ in their last bits; then it takes the place of all parts.
        """
        unread = {name for slot, name in enumerate(self.names) if slot not in leaves}
        parts = {name: number for name, number in self.parts.items() if name not in unread}
        if agreed != self.number:
            parts = {"input": agreed}
        return replace(self, parts=parts | {"option of the module": options})


class InputIdentity:
    """Compares what a module is given in one step and in another.

    Args:
        module: The pipelined module.
        contents: Numbers of tensors.
        cross_edges: What training does with edges between chunks.
    """

    def __init__(
        self, module: nn.Module, contents: ContentNumbers, cross_edges: CrossChunkEdges
    ) -> None:
        self._contents, self._cross_edges = contents, cross_edges
        self._held = _HeldTensors(module, contents)
        self._random_state: Callable[[], Mapping[str, Any]] = dict
        self._before: Mapping[str, Any] = {}
        self._num_random = 0

    def begin_step(self, random_state: Callable[[], Mapping[str, Any]]) -> None:
        """Say that the user's code of a step begins.

        Args:
            random_state: Returns where random numbers stand, in plain types and tensors.
        """
        self._random_state, self._before = random_state, random_state()

    def of(
        self, call: Call, inputs: Inputs, batch: Callable[[], int], *, only_graph: bool = False
    ) -> InputKey:
        """Return the key of a call over one graph.

        Args:
            call: The call.
            inputs: What its tensors are.
            batch: Returns a number of the user's batch.
            only_graph: Whether it is the same where graph and options are.
        """
        parts = {"option": text_fingerprint(repr((call.signature, self._cross_edges)))}
        names = tuple(f"'{name}'" for name in call.names)
        leaves: list[int | None] = []
        graph = [inputs.num_nodes, *inputs.edge_sizes]
        for kind, name, leaf in zip(inputs.kinds, names, call.leaves, strict=True):
            is_ignored = only_graph and kind is not Kind.EDGE_INDEX
            number = None if leaf.requires_grad or is_ignored else self._contents.of(leaf)
            leaves.append(number)
            if is_ignored:
                continue
            parts[name] = self._of_computed(leaf, batch) if number is None else number
            if kind is Kind.EDGE_INDEX:
                graph.append(parts[name])
        if not only_graph:
            parts |= self._held.numbers()
        return InputKey(fold(graph), tuple(leaves), parts, names)

    def end_pass(self) -> None:
        """Take note that the module's own forward may have changed what it holds."""
        self._held.accept()

    def _of_computed(self, leaf: Tensor, batch: Callable[[], int]) -> int:
        """Return a number of the data that weights have computed `leaf` from."""
        sources = find_sources(leaf)
        shape = text_fingerprint(f"{leaf.dtype} {list(leaf.shape)}")
        numbers = [shape, *(self._contents.of(one) for one in sources.tensors)]
        if sources.is_hidden:
            numbers.append(batch())
            if not _is_equal(self._before, self._random_state()):  # drawn in this step
                self._num_random += 1
                numbers.append(self._num_random)
        return fold(numbers)


class _HeldTensors:
    """Buffers and other tensors that a module holds beside its weights.

    What its own forward changes, as a norm its running statistics, is no new input.

    Args:
        module: The module.
        contents: Numbers of tensors.
    """

    def __init__(self, module: nn.Module, contents: ContentNumbers) -> None:
        self._module, self._contents = module, contents
        self._held: dict[str, _Held] = {}

    def numbers(self) -> dict[str, int]:
        """Return the numbers of the tensors, by name."""
        before, self._held = self._held, {}
        for prefix, module in self._module.named_modules():
            held = dict(module.named_buffers(recurse=False)) | vars(module)
            if "running_mean" in held:
                continue
            for key, tensor in held.items():
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    name = f"'{prefix}.{key}' of the module".replace("'.", "'")
                    known, version = before.get(name), version_of(tensor)
                    is_known = known is not None and known.tensor is tensor
                    if known is None or not is_known or known.version != version or version < 0:
                        number = self._contents.of(tensor)
                        known = _Held(module, key, tensor, version, number)
                    self._held[name] = known
        return {name: held.number for name, held in self._held.items()}

    def accept(self) -> None:
        """Take the present state of all tensors for that of their numbers."""
        for held in self._held.values():
            tensor = getattr(held.module, held.key, None)
            if isinstance(tensor, Tensor):
                held.tensor, held.version = tensor, version_of(tensor)


@dataclass(slots=True)
class _Held:
    """An attribute of a module, and its number when it was last given from outside."""

    module: nn.Module
    key: str
    tensor: Tensor
    version: int
    number: int


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return all(_is_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
