"""Fingerprints of the values that forward reads, and a watch on the attributes that it uses.

Plain values and containers compare by content, tensors by identity and version, modules, parameters
and functions by identity, other objects by identity and the content of their attributes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from inspect import currentframe
from itertools import chain
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any, cast
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch_geometric.data.data import BaseData

from lightning_gnnpipe._compat_torch import CALL_OF_MODULE, version_of
from lightning_gnnpipe.errors import UnsupportedError

_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
_MOST = 1000  # containers and objects to inspect
_WITH_STATE = ("itertools", "builtins", "random", "numpy.random")

# Packages whose objects are large, and whose functions depend on their arguments alone.
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


class KeptProxyError(Exception):
    """A value holds a proxy, which stands for a tensor during a trace."""


def is_plain(value: Any) -> bool:
    """Whether `value` is a number, a text, or a tuple or list of them."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return type(value) in _PLAIN


def content_of(value: Any) -> Hashable:
    """Return a fingerprint of `value`; raise `KeptProxyError` if it holds a proxy."""
    return _look(value, {})


def holds_proxy(value: Any) -> bool:
    """Whether `value` holds a proxy."""
    try:
        content_of(value)
    except KeptProxyError:
        return True
    return False


def plain_of(content: Hashable, number_of: Callable[[Tensor], int] | None = None) -> Any:
    """Return the plain part of a fingerprint, equal on all ranks; `number_of` hashes tensors."""
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
    """Equal to the same object in the same version only."""

    __slots__ = ("it", "version")

    def __init__(self, it: object, version: int = -1) -> None:
        self.it, self.version = it, version  # kept alive, so that its id is not reused

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it and self.version == other.version

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
    seen[id(value)] = value  # kept alive, so that its id is not reused
    if isinstance(value, Mapping):
        return kind, *[(_look(key, seen), _look(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return kind, *[_look(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return kind, frozenset(_look(item, seen) for item in value)
    return Same(value), *[_look(part, seen) for part in _parts(value)]


def _parts(value: Any) -> Iterable[Any]:
    """Return the contents of an object that is not a container."""
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
    if isinstance(value, BaseData):
        return (value.to_dict(),)
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


MISSING = object()
_PROGRESS = ("current_epoch", "global_step", "trainer", "log", "log_dict")
_OWN = __name__.partition(".")[0]


@dataclass(slots=True)
class Watched:
    """Attributes of modules that a forward read, and earlier values of the attributes it set."""

    reads: dict[tuple[nn.Module, str], None] = field(default_factory=dict)
    before: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)

    def undo(self) -> None:
        """Restore the attributes that the forward set."""
        for (module, name), value in self.before.items():
            if value is not MISSING:
                setattr(module, name, value)
            elif hasattr(module, name):
                delattr(module, name)

    def kept(self, *, with_values: bool) -> list[str]:
        """Return the names of set attributes that hold a proxy or, `with_values`, a new value."""
        found = []
        for (module, name), before in self.before.items():
            now = getattr(module, name, MISSING)
            has_proxy = holds_proxy(now) or holds_proxy(before)
            if has_proxy or (with_values and content_of(now) != content_of(before)):
                found.append(name)
        return found


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Record attribute reads and writes of a forward; refuse reads of progress, and logging."""
    kind, set_attribute = cast(Any, nn.Module), nn.Module.__setattr__

    def get(module: nn.Module, name: str) -> Any:
        frame = cast(FrameType, currentframe()).f_back
        if _is_read(name, frame):
            if name in _PROGRESS and hasattr(type(module), "current_epoch"):
                _check_progress(name, frame)
            watched.reads[module, name] = None
        return object.__getattribute__(module, name)

    def put(module: nn.Module, name: str, value: Any) -> None:
        if _is_of_forward(cast(FrameType, currentframe()).f_back):
            watched.before.setdefault((module, name), getattr(module, name, MISSING))
        set_attribute(module, name, value)

    kind.__getattribute__, kind.__setattr__ = get, put
    try:
        yield
    finally:
        del kind.__getattribute__
        kind.__setattr__ = set_attribute


def _is_read(name: str, frame: FrameType | None) -> bool:
    """Whether a forward reads the attribute `name` in `frame`."""
    if name == "__dict__":  # torch and functools look attributes up in it
        return _origin(frame)[0] not in ("torch", "functools") and _is_of_forward(frame)
    return not name.startswith("__") and _is_of_forward(frame)


def _is_of_forward(frame: FrameType | None) -> bool:
    """Whether `frame` runs the forward or its callees, not torch.fx or this package."""
    while frame is not None and frame.f_globals.get("__name__") == nn.Module.__module__:
        if frame.f_code is CALL_OF_MODULE:  # hooks and the forward of a module
            return True
        frame = frame.f_back
    parts = _origin(frame)
    return parts[:2] != ["torch", "fx"] and (parts[0] != _OWN or parts[1:2] == ["models"])


def _origin(frame: FrameType | None) -> list[str]:
    """Return the dotted name of the Python module of `frame`, split at the dots."""
    return ("" if frame is None else str(frame.f_globals.get("__name__"))).split(".")


def _check_progress(name: str, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code.co_name in ("global_rank", "local_rank"):
        return  # constant during training
    raise UnsupportedError(
        expected="forward to depend only on its arguments and on plain attributes",
        found=f"self.{name}",
        remedy="Set an attribute in on_train_epoch_start and read it in forward. Log in "
        "training_step.",
    )


@contextmanager
def undone_on_errors(owners: Iterable[dict[str, Any]]) -> Iterator[ExitStack]:
    """If the block fails, restore containers among the attributes `owners`, and call the stack."""
    attributes = list(owners)
    held = [*(one for named in attributes for one in named.values()), *attributes]
    with ExitStack() as undo:
        for one in held:
            if isinstance(one, list | dict | set):
                undo.callback(refill, one, one.copy())
        yield undo
        undo.pop_all()


def refill(container: Any, items: Any) -> None:
    """Replace the contents of a list, dict or set."""
    container.clear()
    add = container.extend if isinstance(container, list) else container.update
    add(items)
