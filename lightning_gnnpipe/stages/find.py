"""Finds the pipelined module, the smallest one that holds all message passing, and its methods.

Which of them is pipelined shows when training calls one. A module that torch.fx cannot trace lists
its layers in a method `pipeline_layers`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe._compat_torch import compiled_calls, without_compile
from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.stages.reads import names_in

LAYER = """    class Mean(MessagePassing):
        def __init__(self):
            super().__init__(aggr="mean")
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)
        def message(self, x_j):
            return x_j"""
LAYER_BY_LAYER = (
    "Where training_step calls layer after layer, put the calls into a method, and call that:\n"
    "    def embed(self, x, edge_index):\n"
    "        x = self.conv1(x, edge_index).relu()\n"
    "        return self.conv2(x, edge_index)"
)

_OF_STEPS = {"log", "log_dict", "manual_backward", "optimizers"}  # no network has them in its code


def contains_passing(module: nn.Module) -> bool:
    """Whether `module` is or holds a message-passing layer."""
    return any(map(_is_layer, module.modules()))


def calls_passing(node: fx.Node, root: nn.Module) -> bool:
    """Whether `node` calls a module with message passing; targets are looked up in `root`."""
    return node.op == "call_module" and contains_passing(root.get_submodule(str(node.target)))


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, MessagePassing)


def is_library(module: nn.Module) -> bool:
    """Whether torch, PyG or Lightning defines the forward of `module`."""
    forward = type(module).forward
    return _is_library(forward) or _origin(forward).startswith("torch_geometric.")


@contextmanager
def switched(module: nn.Module, training: bool, but: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Set the mode of `module`, except of layers in `but`; restore every mode on exit."""
    flags = [(m, m.training) for m in module.modules()]
    kept = [(m, m.training) for m in but]
    module.train(training)
    for m, flag in kept:
        m.training = flag
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


@contextmanager
def as_written(module: nn.Module) -> Iterator[list[str]]:
    """Undo torch.compile of parts with message passing within the block; yield their names."""
    names = []
    with ExitStack() as undo:
        for name, part in module.named_modules():
            owner, attributes = compiled_calls(part)
            if not attributes or not contains_passing(part):
                continue
            names.append(name)
            for attribute, value in attributes.items():
                undo.callback(setattr, owner, attribute, getattr(owner, attribute))
                setattr(owner, attribute, value)
        yield names


def is_listed(module: Any) -> bool:
    """Whether `module` lists its layers in `pipeline_layers`."""
    return hasattr(module, "pipeline_layers")


def listed_parts(module: Any) -> set[int]:
    """Return the ids of the listed submodules and of all modules inside them."""
    if not is_listed(module):
        return set()
    return {id(part) for layer, _ in _entries(module) for part in layer.modules()}


def _entries(module: Any) -> list[tuple[nn.Module, str]]:
    """Return the listed pairs (submodule, text); refuse malformed entries."""
    own = {id(part) for part in module.modules()}
    entries = list(module.pipeline_layers())
    for entry in entries:
        is_pair = isinstance(entry, tuple | list) and len(entry) == 2
        if not is_pair or id(entry[0]) not in own or str(entry[1]).count("->") != 1:
            raise UnsupportedError(
                expected="'pipeline_layers' to return pairs of a submodule and a text such as "
                "'h, edge_index -> h'",
                found=repr(entry),
                remedy="Register the submodules in __init__.",
            )
    return [(layer, str(text)) for layer, text in entries]


def run_listed(call: Call, module: Any, leaves: Sequence[Any], num_graphs: Any) -> Any:
    """Call the listed layers in order and return the outputs of the last one; see `Call.run`."""
    args, kwargs = call.rebuild(leaves, num_graphs)
    bound = inspect.signature(getattr(type(module), call.method)).bind(module, *args, **kwargs)
    bound.apply_defaults()
    values = dict(bound.arguments)
    outputs: list[str] = []
    for layer, text in _entries(module):
        inputs, outputs = ([name.strip() for name in side.split(",")] for side in text.split("->"))
        missing = [name for name in inputs if name not in values]
        if missing:
            raise UnsupportedError(
                expected=f"'{text}' to read parameters of forward or earlier outputs",
                found=", ".join(missing),
                remedy=f"Known names are: {', '.join(values)}.",
            )
        result = layer(*(values[name] for name in inputs))
        parts = [result] if len(outputs) == 1 else [result[i] for i in range(len(outputs))]
        values.update(zip(outputs, parts, strict=True))
    return values[outputs[0]] if len(outputs) == 1 else tuple(values[name] for name in outputs)


class Pipelined(NamedTuple):
    """The pipelined module, its name in the LightningModule, and methods of which one is pipelined.

    The name is empty for the LightningModule itself. The likeliest method is the first.
    """

    name: str
    module: nn.Module
    methods: tuple[str, ...]


def find_pipelined(module: nn.Module, name: str | None) -> Pipelined:
    """Find what to pipeline in `module`; `name` is that of a submodule or method, if given."""
    if name is None:
        _check_passing(module)
        path, found = _descend("", module)
        return Pipelined(path, found, _find_methods(found, module))
    chosen = _find_named(module, name)
    _check_passing(chosen.module)
    return chosen


def _find_named(module: nn.Module, name: str) -> Pipelined:
    owner, _, method = name.rpartition(".")
    for path in (name, owner):
        try:
            found = module.get_submodule(path)
        except AttributeError:
            continue
        is_whole = path == name
        path, found = without_compile(path, found)
        if is_whole:
            return Pipelined(path, found, _find_methods(found, module))
        if isinstance(getattr(type(found), method, None), FunctionType):
            return Pipelined(path, found, (method,))
    raise ConfigError(
        expected="'pipelined_module' to name a submodule of the LightningModule, or a method",
        found=repr(name),
        remedy=f"Its submodules are: {', '.join(child for child, _ in module.named_children())}.",
    )


def _find_methods(module: nn.Module, root: nn.Module) -> tuple[str, ...]:
    """Return forward, if there is one, and methods whose code names a part with message passing.

    First come the ones that the training_step of `root` names, in its order.
    """
    parts = {name for name, child in module.named_children() if contains_passing(child)}
    kind = type(module)
    found = ["forward"] if _has_forward(module) else []
    for name, method in _methods(kind):
        names = set(names_in(method.__code__))
        is_step = names & _OF_STEPS or len(inspect.signature(method).parameters) < 2
        is_hook = any(name in vars(base) for base in kind.__mro__ if _is_library(base))
        if names & parts and not is_step and not is_hook:
            found.append(name)
    starts = ("training_step",) if module is root else ("training_step", "forward")
    called = _names_behind(type(root), *starts)
    found.sort(key=lambda name: called.index(name) if name in called else len(called))
    return tuple(dict.fromkeys(found)) or ("forward",)


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of `kind` and of its bases, with their names."""
    for base in kind.__mro__:
        if not _is_library(base):
            yield from ((n, m) for n, m in vars(base).items() if isinstance(m, FunctionType))


def _names_behind(kind: type, *methods: str) -> list[str]:
    """Return the names in the code of `methods`, and of methods that they name, in their order."""
    found: dict[str, None] = {}

    def follow(name: str) -> None:
        if name not in found:
            found[name] = None
            codes = (one.__code__ for other, one in _methods(kind) if other == name)
            for code in codes:
                read(name, code, codes)

    def read(name: str, code: CodeType, bases: Iterator[CodeType]) -> None:
        for inner in names_in(code):
            if inner == name:  # by super(): the base's code runs here
                for base in bases:
                    read(name, base, bases)
            follow(inner)

    for method in methods:
        follow(method)
    return list(found)


def _descend(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    holders = _find_holders(module)
    is_bare = not name and not _has_forward(module)
    if is_bare:
        called = _names_behind(type(module), "training_step")
        holders = [one for one in holders if one[0].partition(".")[0] in called] or holders
    if len(holders) == 1:
        child_name, child = holders[0]
        if not isinstance(child, MessagePassing):
            found = _descend(f"{name}.{child_name}" if name else child_name, child)
            if not _is_container(found[1]):
                return found
    if is_bare and _find_methods(module, module) == ("forward",):
        are_layers = all(
            isinstance(one, MessagePassing) or _is_container(one) for _, one in holders
        )
        raise UnsupportedError(
            expected="all trainable message-passing layers in one submodule, or in one method of "
            "the LightningModule",
            found=" and ".join(f"'{child}'" for child, _ in holders),
            remedy=LAYER_BY_LAYER
            if are_layers
            else "Choose one with GNNPipeStrategy(pipelined_module=...): each device then "
            "runs the rest whole. Or write a forward of the LightningModule that calls all of "
            "them, and call it in training_step.",
        )
    return name, module


def _find_holders(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return submodules that hold message passing, without second names of the same layers.

    If `module` has no forward and one holder is trainable, frozen holders (teachers) are left out.
    """
    children: dict[nn.Module, str] = {}
    for name, child in itertools.starmap(without_compile, module.named_children()):
        children.setdefault(child, name)
    layers = {child: {id(m) for m in child.modules() if _is_layer(m)} for child in children}
    holders = [
        (name, child)
        for child, name in children.items()
        if layers[child] and not any(_repeats(child, other, layers) for other in children)
    ]
    trained = [one for one in holders if any(p.requires_grad for p in one[1].parameters())]
    return trained if len(trained) == 1 and not _has_forward(module) else holders


def _repeats(child: nn.Module, other: nn.Module, layers: Mapping[nn.Module, set[int]]) -> bool:
    """Whether `child` is a second name for layers that `other` holds and calls."""
    if child is other or _is_container(other) or not layers[child] <= layers[other]:
        return False
    is_inside = any(m is child for m in other.modules())
    return is_inside or _is_container(child) or layers[child] != layers[other]


def _has_forward(module: nn.Module) -> bool:
    """Whether `module` defines a forward of its own, or lists its layers."""
    return not _is_library(type(module).forward) or is_listed(module)


def _is_library(one: Any) -> bool:
    """Whether torch or Lightning defines a class or function."""
    names = ("builtins", "torch", "lightning", "pytorch_lightning")
    return _origin(one).partition(".")[0] in names


def _origin(one: Any) -> str:
    """Return the module of a class or function; empty for code that torch.fx has written."""
    return one.__module__ or ""


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _check_passing(module: nn.Module) -> None:
    if contains_passing(module):
        return
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                expected="message-passing layers in Python",
                found=f"'{name or 'the module itself'}', which torch.jit has compiled",
                remedy="Use the module as it was before torch.jit.script or torch.jit.trace.",
            )
    raise UnsupportedError(
        f"{type(module).__name__} has no message-passing layer "
        "(torch_geometric.nn.MessagePassing).\nBuild the layers in __init__. "
        'Instead of adj_t @ x write SimpleConv(aggr="sum")(x, adj_t), instead of messages by hand '
        f"such a layer:\n{LAYER}\n"
        "Train a model without message passing with another strategy."
    )
