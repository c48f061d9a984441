"""What a value holds, as something to compare later: equal only while a trace of it holds.

Plain values and containers of them count by content, tensors by identity and version, modules and
functions by identity, other objects by identity and by what their attributes hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, cast
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe._compat_torch import version_of

_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_MOST = 1000  # containers and objects that are looked into
_WITH_STATE = ("itertools", "builtins", "random", "numpy.random")

FRAMEWORKS = frozenset(
    {
        "lightning",
        "lightning_fabric",
        "lightning_gnnpipe",
        "lightning_utilities",
        "numpy",
        "pytorch_lightning",
        "scipy",
        "torch",
        "torch_geometric",
        "torch_scatter",
        "torch_sparse",
        "torchmetrics",
    }
)
"""Packages whose objects are large, and whose functions depend on their arguments alone."""


class KeptProxyError(Exception):
    """A value holds what stands for a tensor during a trace."""


def is_plain(value: Any) -> bool:
    """Whether `value` is a number, a text, or a tuple or list of them."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return type(value) in _PLAIN


def content_of(value: Any) -> Hashable:
    """Return what `value` holds.

    Raises:
        KeptProxyError: If a trace has left a proxy in it.
    """
    kind = type(value)
    return (kind, value) if kind in _PLAIN else _look(value, {})


def plain_of(content: Hashable, number_of: Callable[[Tensor], int] | None = None) -> Any:
    """Return what is plain in what `content_of` has returned, the same in every process.

    Args:
        content: What it has returned.
        number_of: Returns a number of a tensor's content; None leaves tensors out.
    """
    if isinstance(content, tuple):
        return tuple(plain_of(part, number_of) for part in content)
    if isinstance(content, frozenset):
        return sorted(repr(plain_of(part, number_of)) for part in content)
    if isinstance(content, Same):
        content = cast(Any, content.it)
    if isinstance(content, Tensor):
        is_data = not isinstance(content, nn.Parameter) and content.layout is torch.strided
        return number_of(content) if number_of is not None and is_data else None
    if isinstance(content, FunctionType):
        code = content.__code__
        return content.__qualname__, code.co_code, repr(code.co_names), repr(code.co_varnames)
    if isinstance(content, nn.Module):
        return type(content).__qualname__, content.extra_repr()
    if isinstance(content, type | BuiltinFunctionType):
        return content.__qualname__
    if isinstance(content, Enum):
        return str(content)
    return content if type(content) in _PLAIN else type(content).__qualname__


class Same:
    """Equal to what is the same object in the same version."""

    __slots__ = ("it", "version")

    def __init__(self, it: object, version: int = -1) -> None:
        self.it, self.version = it, version  # kept alive, so that nothing else takes its place

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        return self.it is other.it and self.version == other.version

    def __hash__(self) -> int:
        return id(self.it)


_BY_IDENTITY = (nn.Module, FunctionType, BuiltinFunctionType, ModuleType, type, Enum, Same)


def _look(value: Any, seen: dict[int, Any]) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, _BY_IDENTITY):
        return value
    if isinstance(value, fx.Proxy):
        raise KeptProxyError
    if isinstance(value, Tensor):
        return Same(value, -1 if isinstance(value, nn.Parameter) else version_of(value))
    if isinstance(value, MethodType):
        return value.__func__, _look(value.__self__, seen)
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, int | float | str | np.generic):
        return kind, value
    if id(value) in seen or len(seen) > _MOST:
        return Same(value)
    seen[id(value)] = value  # kept alive, so that nothing else is given its place
    if isinstance(value, Mapping):
        return kind, *[(_look(key, seen), _look(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return kind, *[_look(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return kind, frozenset(_look(item, seen) for item in value)
    return Same(value), *[_look(part, seen) for part in _parts(value)]


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object that is no container holds."""
    kind = type(value)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, ReferenceType):
        return (value(),)
    if isinstance(value, torch.Generator):
        return (value.get_state().numpy(),)
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return () if frame is None else (frame.f_lasti, dict(frame.f_locals))
    package = kind.__module__.partition(".")[0]
    if package in ("lightning", "lightning_fabric", "pytorch_lightning"):
        return ()  # a Trainer changes in each step
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = chain.from_iterable((one,) if isinstance(one, str) else one for one in slots)
    held = dict(getattr(value, "__dict__", {}))
    held |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    held.pop("__dict__", None)
    held.pop("__weakref__", None)
    if package in FRAMEWORKS - {"numpy"} or package == "logging":
        held = {name: one for name, one in held.items() if type(one) in _PLAIN}
    if kind.__module__.startswith(_WITH_STATE):  # iterators and generators of random numbers
        try:
            return held, value.__reduce_ex__(2)
        except TypeError:
            pass
    return (held,)
