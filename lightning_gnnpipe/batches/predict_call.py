"""Predict the arguments of the next call from the next batch and the last call.

    predict_step(batch): net(batch.x, batch.edge_index)  ->  following.x, following.edge_index

Works for tensors and graphs that the step takes from the batch unchanged. No user code runs ahead
of time. `PredictedCall.matches` checks the prediction when the call comes.
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
    """Placeholder for the object at `path` in a batch."""

    path: tuple[Any, ...]


def predict_call(batch: Any, arguments: Arguments, following: Any) -> Arguments | None:
    """Return `arguments` with objects of `batch` replaced from `following`; None if unknown."""
    places = {id(part): path for path, part in _parts(batch)}
    try:
        return _fill(_find(arguments, places, batch), following)
    except (LookupError, AttributeError, TypeError):
        return None


class PredictedCall:
    """A call expected next, with the present state of its tensors."""

    def __init__(self, call: Call, inputs: Inputs) -> None:
        self.call, self.inputs = call, inputs
        self._marks = [_Mark(leaf) for leaf in call.leaves]

    def matches(self, call: Call) -> bool:
        """Whether `call` has the same tensors, unchanged."""
        ours, theirs = self.call, call
        return (
            (ours.signature, ours.counts) == (theirs.signature, theirs.counts)
            and len(ours.leaves) == len(theirs.leaves)
            and all(map(_Mark.is_at, self._marks, theirs.leaves))
        )


class _Mark:
    """A tensor and its version, or a copy of it where torch counts no writes (inference mode)."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version_of(tensor)
        self._content = tensor.clone() if self._version < 0 else None

    def is_at(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the same object and has not been written to."""
        if tensor is not self._tensor or version_of(tensor) != self._version:
            return False
        return self._content is None or torch.equal(self._content, tensor)


def _parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the graphs and tensors in a batch, each with its path."""
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
    """Replace the objects of the batch in `value` by `_Part`; KeyError for any other tensor."""
    if isinstance(value, Data | Tensor):
        return _Part(places[id(value)])
    if isinstance(value, Mapping):
        return {key: _find(item, places, batch) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_find(item, places, batch) for item in value)
    is_count = type(value) is int and value == getattr(batch, "num_graphs", None)
    return _Part(("num_graphs",)) if is_count else value


def _fill(value: Any, batch: Any) -> Any:
    """Replace each `_Part` in `value` by the object at its path in `batch`."""
    if isinstance(value, _Part):
        for key in value.path:
            batch = batch[key] if isinstance(batch, Mapping | list | tuple) else getattr(batch, key)
        return batch
    if isinstance(value, Mapping):
        return {key: _fill(item, batch) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(item, batch) for item in value)
    return value
