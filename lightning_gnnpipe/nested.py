"""The tensors of a batch, whatever it is: tensors, graphs, and containers of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`: in mappings, lists, tuples and PyG's graphs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name in value:
            yield from tensors_in(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "to_dict"):
        yield from tensors_in(value.to_dict())
