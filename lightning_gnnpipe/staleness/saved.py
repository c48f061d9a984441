"""Rows that autograd saves for backward and a history holds as well are kept once.

A layer's input is often saved by the operation before it, or by its own linear map, when the layer
writes it to its history. Nothing writes these rows of the history before the backward phase of the
step, so autograd can read them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_gnnpipe._compat_torch import version_of

LEAST_NODES = 4096  # in a chunk; memory of smaller ones is not worth the look at each tensor


@dataclass(slots=True, eq=False)
class _Saved:
    """A tensor that autograd saves."""

    tensor: Tensor


class SavedRows:
    """The tensors that autograd has saved while one chunk runs."""

    def __init__(self) -> None:
        self._found: dict[Any, list[_Saved]] = {}
        # Rows, which keep their memory so long, their version, and their place.
        self._moved: dict[Any, tuple[Tensor | None, int, Tensor]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what autograd saves within the block."""
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._found.clear()
            self._moved.clear()

    def replace(self, rows: Tensor, place: Tensor) -> None:
        """Let autograd read `rows` from `place`, which holds a copy."""
        memory = _memory_of(rows)
        self._moved[memory] = rows.detach(), version_of(rows), place
        for one in self._found.pop(memory, ()):
            one.tensor = place

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        is_strided = tensor.layout is torch.strided and tensor.is_contiguous()
        if not is_strided or tensor.dim() < 2 or tensor.size(0) < LEAST_NODES:
            return tensor
        memory = _memory_of(tensor)
        _, version, place = self._moved.get(memory, (None, -1, tensor))
        if version == version_of(tensor) >= 0:  # not changed in place since
            return _Saved(place)
        saved = _Saved(tensor.detach())
        self._found.setdefault(memory, []).append(saved)
        return saved


def _unpack(saved: Tensor | _Saved) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def _memory_of(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
