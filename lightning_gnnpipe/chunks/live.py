"""Counts the bytes of tensors while they live."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import DispatchMode, pytree


class LiveBytes(DispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, counts tensors that operations make, until nothing refers to them.

    What an operation makes and frees within itself is not seen, nor are sparse tensors and
    subclasses of tensors.

    Attributes:
        now: Bytes that live.
        most: The most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known = dict[int, weakref.ref[Any]]()  # by address

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read = map(_storage_of, pytree.tree_leaves((args, kwargs)))
        given = {one.data_ptr() for one in read if one is not None}
        found = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(found):
            storage = _storage_of(one)
            if storage is not None and storage.data_ptr() not in given:
                self._add(storage)
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address in self._known or address == 0:
            return

        def forget(_: Any) -> None:
            del self._known[address]
            self.now -= num_bytes

        self._known[address] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.most = max(self.most, self.now)


def _storage_of(value: Any) -> torch.UntypedStorage | None:
    is_dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return value.untyped_storage() if is_dense else None
