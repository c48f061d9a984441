"""The arguments of the next call, told from the next batch by how the last ones came from theirs.

    predict_step(batch): net(batch.x, batch.edge_index)  ->  following.x, following.edge_index

Only what is in a batch as it is can be told so. Nothing of the user's code runs ahead of its time,
and whether a call has come as foreseen is looked at when it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.calls import Call, Inputs

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Stands for what is at this place in a batch."""

    path: tuple[Any, ...]


def predict_call(batch: Any, arguments: Arguments, following: Any) -> Arguments | None:
    """Return what `arguments` will be when `following` comes as `batch` has; None if unknown.

    Args:
        batch: What the user's step got.
        arguments: What it called the module with.
        following: The batch after it.
    """
    places = {id(part): path for path, part in _parts(batch)}
    try:
        return _fill(_find(arguments, places, batch), following)
    except (LookupError, AttributeError, TypeError):
        return None


class PredictedCall:
    """A call that has not been made yet.

    Args:
        call: The call.
        inputs: What its leaves are.

    Attributes:
        call: The same.
        inputs: The same.
    """

    def __init__(self, call: Call, inputs: Inputs) -> None:
        self.call, self.inputs = call, inputs
        self._marks = [_Mark(leaf) for leaf in call.leaves]

    def matches(self, call: Call) -> bool:
        """Whether `call` is this one: the same tensors, with the same content."""
        ours, theirs = self.call, call
        return (
            (ours.signature, ours.counts) == (theirs.signature, theirs.counts)
            and len(ours.leaves) == len(theirs.leaves)
            and all(map(_Mark.is_at, self._marks, theirs.leaves))
        )


class _Mark:
    """A tensor and what was in it; a copy, where torch does not count what is written to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version_of(tensor)
        self._content = tensor.clone() if self._version < 0 else None

    def is_at(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the same, and has not been written to."""
        if tensor is not self._tensor or version_of(tensor) != self._version:
            return False
        return self._content is None or torch.equal(self._content, tensor)


def _parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield graphs and tensors in a batch, and where each is."""
    if isinstance(value, Data | Tensor):
        yield path, value
    items: Any = ()
    if isinstance(value, Data | Mapping):
        items = value.items() if isinstance(value, Mapping) else value
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from _parts(item, (*path, key))


def _find(value: Any, places: Mapping[int, tuple[Any, ...]], batch: Any) -> Any:
    """Return `value` with `_Part` for whatever is in the batch.

    Raises:
        LookupError: If a tensor or graph is not.
    """
    if isinstance(value, Data | Tensor):
        return _Part(places[id(value)])
    if isinstance(value, Mapping):
        return {key: _find(item, places, batch) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_find(item, places, batch) for item in value)
    is_count = type(value) is int and value == getattr(batch, "num_graphs", None)
    return _Part(("num_graphs",)) if is_count else value


def _fill(value: Any, batch: Any) -> Any:
    """Return `value` with what is in `batch` for each `_Part`."""
    if isinstance(value, _Part):
        for key in value.path:
            batch = batch[key] if isinstance(batch, Mapping | list | tuple) else getattr(batch, key)
        return batch
    if isinstance(value, Mapping):
        return {key: _fill(item, batch) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(item, batch) for item in value)
    return value
