"""Counts, on the CPU, a block's operations and those for which the host of a GPU would wait."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# The result, or its size, depends on values: the host reads them.
_READING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount"}
_READING |= {"_unique2", "unique_dim", "unique_consecutive", "is_nonzero"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Copies to the host, or of a list to the device.
_COPYING = {"tolist", "cpu", "numpy", "new_tensor", "tensor", "as_tensor", "__setitem__"}


class Waits:
    """`num_ops`: operations; `places`: of waits, by "file:line of the package, operation"."""

    def __init__(self) -> None:
        self.num_ops = 0
        self.places: Counter[str] = Counter()

    def note(self, name: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/lightning_gnnpipe/" in f.filename]
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
        self.places[f"{place}, {name}"] += 1


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.waits.num_ops += 1
        is_mask = name in _INDEXING and any(
            isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        is_sized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _READING or is_mask or is_sized:
            self.waits.note(name)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_list = name == "__setitem__" and isinstance(args[1], list)
        is_host = str(kwargs.get("device", "")) == "cpu"
        if name in _COPYING and (is_list or name != "__setitem__") and not is_host:
            self.waits.note(name)
        return func(*args, **kwargs)


@contextmanager
def counting_waits() -> Iterator[Waits]:
    """Count within the block; backward on the CPU runs in this thread, and counts as well."""
    waits = Waits()
    with _Calls(waits), _Operations(waits):
        yield waits
