"""Records what a forward reads besides its arguments: options, flags, globals, closures, classes.

A trace bakes these values in, so it is reused only while they are unchanged. Attribute reads on
modules are watched during the trace, functions among them are followed to their globals, closures
and defaults. A function is assumed to read every global in its code; of classes and Python modules,
only members with a name in its code are recorded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dis import get_instructions
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from lightning_gnnpipe._compat_torch import registry_of
from lightning_gnnpipe.stages.content import (
    FRAMEWORKS,
    MISSING,
    Same,
    Watched,
    content_of,
    holds_proxy,
    is_plain,
    plain_of,
)

Sources = dict[tuple[str, int], Callable[[], Any]]  # by name and id of the owner

_LIBRARIES = FRAMEWORKS | sys.stdlib_module_names
_MOST = 1000  # items of a container that are searched for functions
_GLOBAL_STATE: dict[str, Callable[[], Any]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "get_default_dtype": torch.get_default_dtype,
    "environ": lambda: dict(os.environ),
    "getenv": lambda: dict(os.environ),
}


class Reads:
    """Sources of the values that a forward reads besides its arguments."""

    def __init__(self) -> None:
        self._sources: Sources = {}

    @staticmethod
    def of(module: nn.Module, method: str, watched: Watched) -> Reads:
        """Return the reads of a method of `module`; `watched` holds its attribute reads."""
        reads = Reads()
        walk = _Walk(module, reads._sources)
        walk.visit(type(module))
        walk.visit(getattr(type(module), method))
        for owner, name in watched.reads:
            walk.attribute(owner, name)
        walk.finish()
        return reads

    @staticmethod
    def merged(several: Iterable[Reads]) -> Reads:
        """Return the union of `several`."""
        reads = Reads()
        for one in several:
            reads._sources |= one._sources
        return reads

    @staticmethod
    def of_parts(module: nn.Module, is_traced: Callable[[nn.Module], bool]) -> Reads:
        """Return possible reads of untraced parts of `module`, except dropout rates and modes."""
        reads, of_torch = Reads(), vars(nn.Module())
        walk = _Walk(module, reads._sources)
        for part in module.modules():
            if is_traced(part):
                continue
            is_library = walk.is_library(type(part).__module__)
            rates = ("dropout", "p") if "Dropout" in type(part).__name__ else ("dropout",)
            for name, value in list(vars(part).items()):
                is_left_out = name in of_torch or name in rates
                is_own = not is_library or (name[0] != "_" and is_plain(value))
                if is_own and not is_left_out and not isinstance(value, torch.Tensor):
                    walk.attribute(part, name)
            if not is_library:
                walk.visit(type(part))
                for function in vars(type(part)).values():
                    if isinstance(function, FunctionType):
                        walk.visit(function)
        walk.finish()
        return reads

    def values(self) -> tuple[Hashable, ...]:
        """Return the present values as fingerprints; see `content_of`."""
        return tuple([content_of(read()) for read in self._sources.values()])

    def plain(
        self, values: tuple[Hashable, ...], number_of: Callable[[torch.Tensor], int] | None = None
    ) -> list[tuple[str, Any]]:
        """Return the plain part of `values` by name, the same in every process and mode."""
        named = zip((name for name, _ in self._sources), values, strict=True)
        return sorted(
            (name, repr(plain_of(value, number_of)))
            for name, value in named
            if name.rpartition(".")[2] != "training" and name not in _GLOBAL_STATE
        )

    def kept(self) -> list[str]:
        """Return the names of the sources where a trace has left a proxy."""
        return [name for (name, _), read in self._sources.items() if holds_proxy(read())]

    def changed(self, before: tuple[Hashable, ...], now: tuple[Hashable, ...]) -> list[str]:
        """Return the names of the sources whose values differ."""
        triples = zip(self._sources, before, now, strict=True)
        return [name for (name, _), old, new in triples if old != new]


class _Walk:
    """Finds sources by following functions to the names in their code."""

    def __init__(self, module: nn.Module, sources: Sources) -> None:
        self._sources = sources
        self._path = {id(m): name for name, m in module.named_modules()}
        self._own = {type(m).__module__.partition(".")[0] for m in module.modules()}
        self._names: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._spaces: dict[int, type | ModuleType] = {}

    def finish(self) -> None:
        """Follow the names of all functions into classes and modules until nothing new is found."""
        known = 0
        while known != (known := len(self._sources) + len(self._seen)):
            for space in list(self._spaces.values()):
                for name in {n for n in self._names if n[:2] != "__"} & vars(space).keys():
                    self._member(space, name)
        for name in sorted(self._names & _GLOBAL_STATE.keys()):
            self._source(name, _GLOBAL_STATE[name], os)

    def attribute(self, module: nn.Module, name: str) -> None:
        found = next((vars(c)[name] for c in type(module).__mro__ if name in vars(c)), None)
        if isinstance(found, property):  # its reads of modules were watched as well
            self.visit(found)
            return
        path = self._path.get(id(module), type(module).__name__)
        registry = registry_of(module, name)
        read = partial(getattr, module, name, MISSING)
        if registry is not None:  # by identity: each step reads the values anew
            read = partial(_same_in, registry, name)
        self._source(f"{path}.{name}".removeprefix("."), read, module)

    def visit(self, value: Any) -> None:
        """Search `value` for functions and add what they read."""
        value = value.it if isinstance(value, Same) else value
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif isinstance(value, staticmethod | classmethod):
            self.visit(value.__func__)
        elif isinstance(value, property):
            self.visit(value.fget)
        elif isinstance(value, type | ModuleType):
            is_module = isinstance(value, ModuleType)
            for one in (value,) if is_module else value.__mro__:
                if not self.is_library(one.__name__ if is_module else one.__module__):
                    self._spaces.setdefault(id(one), one)
        else:
            for part in self._parts(value):
                self.visit(part)

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, Mapping):
            yield from list(value.values())[:_MOST]
        elif isinstance(value, list | tuple | set | frozenset):
            yield from list(value)[:_MOST]
        elif not isinstance(value, torch.Tensor):
            yield type(value)
            if not self.is_library(type(value).__module__) and not isinstance(value, nn.Module):
                yield getattr(value, "__dict__", {})
                yield vars(type(value)).get("__call__")

    def _function(self, function: FunctionType) -> None:
        if self.is_library(function.__module__ or ""):
            return
        label = function.__qualname__
        names = set(names_in(function.__code__))
        self._names |= names
        for name in set(globals_in(function.__code__)) & function.__globals__.keys():
            read = partial(function.__globals__.get, name, MISSING)
            self._source(f"{function.__module__}.{name}", read, function.__globals__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._source(f"{label}.{name}", partial(_read_cell, cell), cell)
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            if getattr(function, name):
                self._source(f"{label}.{name}", partial(getattr, function, name), function)

    def _member(self, space: type | ModuleType, name: str) -> None:
        """Add the member `name` of a class or Python module."""
        value = vars(space)[name]
        if isinstance(value, FunctionType | staticmethod | classmethod | property):
            self.visit(value)
            return
        for one in list(self._spaces.values()):  # a subclass may override it
            if one is space or (isinstance(one, type) and space in one.__mro__):
                read = partial(getattr, one, name, MISSING)
                self._source(f"{one.__name__}.{name}", read, one)

    def is_library(self, name: str) -> bool:
        """Whether the Python module `name` is not the user's code."""
        top = name.partition(".")[0]
        if top in _LIBRARIES or top in self._own:
            return top in _LIBRARIES
        return "-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")

    def _source(self, name: str, read: Callable[[], Any], owner: object) -> None:
        if (name, id(owner)) not in self._sources:
            self._sources[name, id(owner)] = read
            self.visit(read())


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that `code` may read, and texts in it that could be names."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(Config, "scale")
            yield constant


def globals_in(code: CodeType) -> Iterator[str]:
    """Yield the names that `code` reads as globals."""
    for step in get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_in(constant)


def _same_in(registry: Mapping[str, Any], name: str) -> Same:
    return Same(registry.get(name, MISSING))


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
