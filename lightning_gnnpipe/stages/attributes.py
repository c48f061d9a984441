"""What a module holds: its plain attributes are constants of a trace, which keeps none of its own.

A trace is reused while the parts of the module are the same objects and their plain attributes are
equal: numbers, texts, functions; tensors by identity and version; tuples, lists, dicts and
namespaces of these; on forward's own modules also arrays, enums, sets, dataclasses and partials.
What else forward reads, such as globals, closures and os.environ, stays as in the trace, as in
torch.export.

Parameters and buffers with a row a node or edge become leaves of a call, as its arguments are:

    self.emb = nn.Embedding(num_nodes, 64)              and forward reads self.emb.weight
    self.register_buffer("edge_index", edge_index)      and forward reads self.edge_index

As leaves they are cut by chunk; such a parameter stays a weight of the stages that read it. Other
parameters and buffers are no leaves; each stage reads them whole.
"""

from __future__ import annotations

import copy
import random
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe._compat_torch import RUNNING_HOOK, version_of
from lightning_gnnpipe.calls import Call, EdgeSets, count_nodes, find_edge_sets
from lightning_gnnpipe.errors import GNNPipeError, UnsupportedError
from lightning_gnnpipe.stages.find import is_library, owners_of

_OF_TORCH = frozenset((*vars(nn.Module()), RUNNING_HOOK))
_KINDS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_KINDS |= {torch.dtype, torch.device, torch.Size, FunctionType, BuiltinFunctionType, type}
_HOLDERS = (tuple, list, dict, SimpleNamespace, Namespace, np.generic)
_OTHERS = (np.ndarray, Enum, range, set, frozenset, partial, MethodType)  # of forward itself
_MOST = 1000  # items of a container
_MOST_FORMS = 32  # of calls to remember


class _Identity(int):
    """An id or a version, which differs between processes: no part of texts."""

    def __repr__(self) -> str:
        return "object"


# Whose attribute it is: of a module that is traced through, of a library's or a user's module that
# runs as it is, or the rate of dropout of one that does.
TRACED, OF_LIBRARY, OF_USERS, RATE = range(4)
_CALLED = OF_LIBRARY, OF_USERS, RATE


class State(NamedTuple):
    """What a trace takes as constants."""

    parts: Hashable  # modules, and tensors that forward itself reads, by identity
    is_grad_enabled: bool
    attributes: tuple[tuple[int, str, str, Any], ...]  # whose it is, path, name, content

    def of(self, *owners: int) -> dict[tuple[str, str], Any]:
        """Return the contents of attributes by path and name."""
        return {one[1:3]: one[3] for one in self.attributes if one[0] in owners}

    def changed(self, before: State, *owners: int) -> list[tuple[str, str]]:
        """Return path and name of attributes that differ; by default of all."""
        old, now = (one.of(*owners or (TRACED, *_CALLED)) for one in (before, self))
        return [key for key in now | old if now.get(key) != old.get(key)]

    def without(self, names: Collection[tuple[str, str]]) -> State:
        """Return the state without attributes of modules that run as they are."""
        kept = [one for one in self.attributes if not one[0] or one[1:3] not in names]
        return self._replace(attributes=tuple(kept))

    @property
    def text(self) -> str:
        """The attributes, without rates of dropout, the same in each process."""
        read = [one for one in self.attributes if one[0] != RATE]
        return re.sub(" at 0x[0-9a-f]+", "", repr(read))


class Guard:
    """Tells whether a trace of `module` still holds."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = list[nn.Module]()
        self._owners = list[nn.Module]()
        self._named = list[tuple[str, nn.Module, int]]()
        self._left = set[tuple[str, str]]()

    def leave(self, names: Collection[tuple[str, str]]) -> None:
        """Let attributes, by path and name, of modules that run as they are, change from now on."""
        self._left |= set(names)

    def state(self) -> State:
        modules = list(self._module.modules())
        if modules != self._modules:  # by identity
            self._modules, self._owners = modules, [one for _, one in owners_of(self._module)]
            traced = {*self._owners}
            self._named = [
                (path, one, TRACED if one in traced else _CALLED[not is_library(one)])
                for path, one in self._module.named_modules()
                if not type(one).__module__.startswith("torchmetrics.")
            ]
        held = [one(recurse=False) for m in self._owners for one in (m.parameters, m.buffers)]
        tensors = tuple([id(one) for several in held for one in several])
        found: list[tuple[int, str, str, Any]] = []
        for path, one, owner in self._named:
            for name, value in vars(one).items():
                if name in _OF_TORCH or (owner == OF_LIBRARY and name[0] == "_"):
                    continue
                if owner and (value is None or (path, name) in self._left):  # its own result
                    continue
                if type(value) in _KINDS:
                    content: Any = type(value), value
                elif isinstance(value, _HOLDERS) or (not owner and _is_read(value)):
                    content = _content(value)
                else:
                    continue
                is_rate = name == "dropout" or (name == "p" and "Dropout" in type(one).__name__)
                found.append((RATE if owner and is_rate else owner, path, name, content))
        return State((*modules, tensors), torch.is_grad_enabled(), tuple(found))


def _is_read(value: Any) -> bool:
    is_instance = is_dataclass(value) and not isinstance(value, type)
    return is_instance or isinstance(value, (Tensor, *_OTHERS))


def _content(value: Any) -> tuple[Any, ...]:
    """Return what tells two values apart: plain ones by content, all else by identity."""
    if isinstance(value, np.ndarray) and value.nbytes <= 8 * _MOST and not value.dtype.hasobject:
        return type(value), value.shape, value.tobytes()
    if isinstance(value, range | set | frozenset) and len(value) <= _MOST:
        return type(value), *sorted(map(repr, value))  # in the same order in each process
    if isinstance(value, Enum):
        return type(value), value.name
    if isinstance(value, MethodType):
        return type(value), value.__func__, _Identity(id(value.__self__))
    if isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    elif is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        value = SimpleNamespace(**vars(value))
    if type(value) in _KINDS or isinstance(value, np.generic):
        return type(value), value
    if isinstance(value, Tensor):
        return Tensor, _Identity(id(value)), _Identity(version_of(value))
    items = vars(value) if isinstance(value, SimpleNamespace | Namespace) else value
    if not isinstance(items, tuple | list | dict) or len(items) > _MOST:
        return type(value), _Identity(id(value))
    parts = (*items, *items.values()) if isinstance(items, dict) else items
    return type(value), *map(_content, parts)


class Snapshot:
    """The attributes of all parts of a module, with the contents of containers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {
            (one, name): (value, copy.copy(value) if type(value) in (list, dict, set) else None)
            for one, name, value in _attributes(module)
        }

    def restore(self) -> None:
        for one, name, _ in list(_attributes(self._module)):
            if (one, name) not in self._before:
                object.__delattr__(one, name)
        for (one, name), (value, held) in self._before.items():
            if held is not None:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(held)
            object.__setattr__(one, name, value)

    def changed(self) -> dict[str, Any]:
        """Return the attributes that are new, or hold other values."""
        found = {}
        for one, name, value in _attributes(self._module):
            old, held = self._before.get((one, name), (_attributes, None))
            is_same = _is_same(old, value) if held is None else old is value
            if not is_same or (held is not None and not _has_same(held, value)):
                found[name] = value
        return found


def _is_same(one: Any, other: Any) -> bool:
    is_plain = type(one) is type(other) and type(one) in _KINDS
    return one is other or (is_plain and bool(one == other))


def _has_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        one, other = (*one, *one.values()), (*other, *other.values())
    return len(one) == len(other) and all(map(_is_same, one, other))


def holds_proxy(value: Any) -> bool:
    """Whether `value` is, or holds, what stands for a tensor during a trace."""
    if isinstance(value, Mapping):
        return any(map(holds_proxy, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(holds_proxy, value))
    return isinstance(value, fx.Proxy)


def _attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the attributes of modules, without weights, buffers, hooks and submodules."""
    for one in module.modules():
        slots = [name for kind in type(one).__mro__ for name in vars(kind).get("__slots__", ())]
        for name in (*vars(one), *slots):
            if name not in _OF_TORCH and hasattr(one, name):
                yield one, name, getattr(one, name)


@contextmanager
def restored_on_errors(module: nn.Module) -> Iterator[Snapshot]:
    """If the block fails, restore the attributes of `module`."""
    before = Snapshot(module)
    try:
        yield before
    except BaseException:
        before.restore()
        raise


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Restore random states, buffers, attributes and contents of containers in `module` on exit."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    before = Snapshot(module)
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    try:
        with undrawn(devices):
            yield
    finally:
        restore_buffers(module, buffers)
        before.restore()


@contextmanager
def undrawn(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's random numbers on exit."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def random_states(devices: Iterable[torch.device] = ()) -> Hashable:
    """Return the states of Python's, NumPy's and torch's random numbers."""
    of_torch = (torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices))
    name, numbers, *rest = np.random.get_state()
    arrays = (np.asarray(numbers), *(state.numpy() for state in of_torch))
    return random.getstate(), name, *rest, *(array.tobytes() for array in arrays)


def own_random_states(module: nn.Module) -> Hashable:
    """Return the states of the generators that modules hold."""
    found = list[str]()
    for _, _, value in _attributes(module):
        if isinstance(value, torch.Generator):
            found.append(str(value.get_state().tolist()))
        elif isinstance(value, np.random.Generator):
            found.append(repr(value.bit_generator.state))
        elif isinstance(value, random.Random):
            found.append(repr(value.getstate()))
    return tuple(found)


def restore_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copy `buffers` back into `module`."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


class _NoProgress:
    """Takes the place of the Trainer: a forward must not depend on the progress of training."""

    def __init__(self, trainer: Any, is_allowed: Callable[[], bool]) -> None:
        self._trainer, self._is_allowed = trainer, is_allowed

    def __getattr__(self, name: str) -> Any:
        is_constant = name in ("global_rank", "local_rank", "world_size")  # during training
        if is_constant or self._is_allowed():
            return getattr(self._trainer, name)
        raise UnsupportedError(
            expected="forward to depend only on its arguments and on plain attributes",
            found="self.log" if name == "barebones" else f"self.{name}, of the trainer",
            remedy="Set an attribute in on_train_epoch_start and read it in forward. Log in "
            "training_step.",
        )


@contextmanager
def refusing_progress(module: nn.Module, is_allowed: Callable[[], bool]) -> Iterator[None]:
    """Unless `is_allowed`, refuse reads of the trainer in `module` within the block."""
    owners: Iterable[Any] = [one for one in module.modules() if hasattr(type(one), "trainer")]
    before = []
    for one in owners:
        try:
            before.append((one, one.trainer))
        except RuntimeError:  # it has none
            before.append((one, None))
    for one, trainer in before:
        one.trainer = _NoProgress(trainer, is_allowed)
    try:
        yield
    finally:
        for one, trainer in before:
            one.trainer = trainer


class HeldTensors:
    """Adds the tensors of `module` with a row a node or edge to each call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Hashable, tuple[tuple[str, ...], int]] = {}
        self.left_out: Container[Tensor] = ()  # weights that not every rank holds

    def attach(self, call: Call) -> Call:
        """Return the call with these tensors as more leaves."""
        key = call.signature, tuple([leaf.shape for leaf in call.leaves])
        if key not in self._known:
            if len(self._known) >= _MOST_FORMS:
                del self._known[next(iter(self._known))]
            self._known[key] = self._find(call)
        names, num_nodes = self._known[key]
        if not names:
            return call
        return call.with_held({n: attrgetter(n)(self._module) for n in names}, num_nodes)

    def _find(self, call: Call) -> tuple[tuple[str, ...], int]:
        """Return the names of the tensors to add, and the number of nodes."""
        tensors = dict(self._tensors())
        edges = {name: one for name, one in tensors.items() if _is_edges(name, one)}
        rows = {name: one.size(0) for name, one in tensors.items() if name not in edges}
        if not tensors:
            return (), 0
        with_edges = call.with_held(edges, call.num_nodes)
        sets = find_edge_sets(with_edges, needs_edges=False)
        try:
            num_nodes = count_nodes(with_edges, sets)
        except GNNPipeError:  # no argument shows it
            ends = [with_edges.leaves[slot] for slot in sets.slots]
            lowest = 1 + max((int(one.max()) for one in ends if one.numel()), default=-1)
            likely = (size for size in rows.values() if size >= lowest and size not in sets.sizes)
            num_nodes = next(likely, -1)
        own = [n for n, size in rows.items() if size == num_nodes or _has_edges(n, size, sets)]
        return (*edges, *own), num_nodes

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that code of forward itself may read."""
        for prefix, owner in owners_of(self._module):
            named = (owner.named_parameters(recurse=False), owner.named_buffers(recurse=False))
            for name, one in chain(*named):
                if one.dim() and one.layout is torch.strided and one not in self.left_out:
                    yield f"{prefix}.{name}".removeprefix("."), one


def _has_edges(name: str, size: int, sets: EdgeSets) -> bool:
    """Whether a tensor of `size` rows belongs to one edge set, and it is clear to which one."""
    try:
        return sets.owner(name, size) >= 0
    except GNNPipeError:
        return False


def _is_edges(name: str, value: Tensor) -> bool:
    is_index = value.dtype in (torch.int64, torch.int32) and value.dim() == 2
    return is_index and value.size(0) == 2 and "edge_index" in name
