"""Finds the pipelined module: the smallest one that holds all message passing and has a forward.

`pipelined_module` names another, or a method. A module that torch.fx cannot trace lists its layers
in a method `pipeline_layers`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from lightning_gnnpipe._compat_pyg import method_of
from lightning_gnnpipe._compat_torch import compiled_calls, without_compile
from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.errors import ConfigError, UnsupportedError

LAYER = """    class Sum(MessagePassing):
        def forward(self, x, edge_index): return self.propagate(edge_index, x=x)
        def message(self, x_i, x_j): return x_j"""
_NUM_SHOWN = 6
_LAYER_BY_LAYER = (
    "If it calls layer after layer, put the calls into forward, and call self(x, edge_index):\n"
    "    def forward(self, x, edge_index):\n"
    "        x = self.conv1(x, edge_index).relu()\n"
    "        return self.conv2(x, edge_index)"
)


def contains_passing(module: nn.Module) -> bool:
    """Whether `module` is or holds a message-passing layer."""
    return any(isinstance(one, MessagePassing) for one in module.modules())


def calls_passing(node: fx.Node, root: nn.Module) -> bool:
    """Whether `node` calls a module with message passing; targets are looked up in `root`."""
    return node.op == "call_module" and contains_passing(root.get_submodule(str(node.target)))


def is_traced_through(module: nn.Module) -> bool:
    """Whether the forward of `module` is traced; if not, the module is a leaf.

    Leaves: message-passing layers, modules without any, PyG's reversible blocks (inspect shapes).
    """
    is_called = isinstance(module, MessagePassing | InvertibleModule)
    return contains_passing(module) and not is_called


def owners_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose parameters and buffers forward itself may read, with their names."""
    tables = (nn.Embedding, nn.ParameterList, nn.ParameterDict)
    for name, one in module.named_modules():
        if is_traced_through(one) or isinstance(one, tables):
            yield name, one


def is_library(module: nn.Module) -> bool:
    """Whether torch, PyG or Lightning defines the forward of `module`."""
    forward = type(module).forward
    return _is_library(forward) or _is_of_pyg(forward)


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
    bound = inspect.signature(method_of(module, call.method)).bind(module, *args, **kwargs)
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
    """The pipelined module, its name in the LightningModule, and its method that is pipelined.

    The name is empty for the LightningModule itself.
    """

    name: str
    module: nn.Module
    method: str

    @property
    def call(self) -> str:
        """What the LightningModule calls, such as "net.forward"."""
        return f"{self.name}.{self.method}".lstrip(".")


def find_pipelined(module: nn.Module, name: str | None) -> Pipelined:
    """Find what to pipeline in `module`; `name` is that of a submodule or method, if given."""
    if name is not None:
        chosen = _find_named(module, name)
        _check_passing(chosen.module)
        return chosen
    _check_passing(module)
    found = _find_smallest("", module)
    if found is None:
        holders = " and ".join(f"'{name}'" for name, _ in _find_holders(module))
        _refuse(module, f"Message passing is in {holders}, without a forward that holds all of it")
    return found


def refuse_uncalled(module: nn.Module, found: Pipelined) -> NoReturn:
    """Refuse a training step of `module` that did not call what is pipelined."""
    owner = f"'{found.name}'" if found.name else "the LightningModule"
    own = [one for one in (found.name, found.method) if one not in ("", "forward")]
    fact = f"training_step does not call {found.method} of {owner}, which is pipelined"
    _refuse(module, fact, ".".join(own))


def _refuse(module: nn.Module, fact: str, own: str = "") -> NoReturn:
    read = _names_in(type(module), "training_step")
    names = [one for one in _callable_names(module) if one != own]
    names = [one for one in names if one.rpartition(".")[2] in read]
    lines = "".join(
        f'\n    GNNPipeStrategy(pipelined_module="{one}")' for one in names[:_NUM_SHOWN]
    )
    advice = " Name the module or method that returns embeddings or logits, not a loss, and that "
    advice = f"{advice}training_step calls:{lines}" if lines else ""
    raise UnsupportedError(f"{fact}.{advice}\n{_LAYER_BY_LAYER}")


def _names_in(kind: type, method: str) -> set[str]:
    """Return the names in the code of a method, and of methods of `kind` that it names."""
    found, waiting = set[str](), [method]
    while waiting:
        code = getattr(getattr(kind, waiting.pop(), None), "__code__", None)
        new = set() if code is None else {*code.co_names} - found
        found |= new
        waiting += new
    return found


def _find_named(module: nn.Module, name: str) -> Pipelined:
    owner, _, method = name.rpartition(".")
    for path in (name, owner):
        try:
            found = module.get_submodule(path)
        except AttributeError:
            continue
        is_whole = path == name
        path, found = without_compile(path, found)
        if is_whole and not _has_forward(found):
            _refuse(module, f"'{name}' has no forward")
        if is_whole or isinstance(getattr(type(found), method, None), FunctionType):
            return Pipelined(path, found, "forward" if is_whole else method)
    raise ConfigError(
        expected="'pipelined_module' to name a submodule of the LightningModule, or a method",
        found=repr(name),
        remedy=f"Its submodules are: {', '.join(child for child, _ in module.named_children())}.",
    )


def _callable_names(root: nn.Module) -> Iterator[str]:
    """Yield names of modules with message passing and a forward, and of methods of such modules."""
    (_, own), *inside = itertools.starmap(without_compile, root.named_modules())
    for path, module in sorted(inside, key=lambda one: one[0].count(".")):
        if contains_passing(module) and not isinstance(module, MessagePassing):
            yield from [path] if _has_forward(module) else []
            yield from (f"{path}.{name}" for name in _methods(module))
    yield from _methods(own)


def _methods(module: nn.Module) -> list[str]:
    """Return the names of public methods that no library defines and that take an argument."""
    kinds = type(module).__mro__
    bases = [one for one in kinds if _is_library(one) or _is_of_pyg(one)]
    own = {name: one for kind in reversed(kinds) for name, one in vars(kind).items()}
    return [
        name
        for name, one in own.items()
        if isinstance(one, FunctionType)
        and not (name.startswith("_") or any(hasattr(base, name) for base in bases))
        and len(inspect.signature(one).parameters) > 1
    ]


def _find_smallest(name: str, module: nn.Module) -> Pipelined | None:
    """Return the smallest module with all message passing of `module` and a forward, if any."""
    holders = _find_holders(module)
    if len(holders) == 1:
        child_name, child = holders[0]
        if not isinstance(child, MessagePassing):
            path = f"{name}.{child_name}" if name else child_name
            found = _find_smallest(path, child)
            if found is not None:
                return found
    return Pipelined(name, module, "forward") if _has_forward(module) else None


def _find_holders(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return submodules that hold message passing, without second names of the same layers.

    If `module` has no forward and one holder is trainable, frozen holders (teachers) are left out.
    """
    children: dict[nn.Module, str] = {}
    for name, child in itertools.starmap(without_compile, module.named_children()):
        children.setdefault(child, name)
    layers = {
        child: {id(m) for m in child.modules() if isinstance(m, MessagePassing)}
        for child in children
    }
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


def _is_of_pyg(one: Any) -> bool:
    return _origin(one).startswith("torch_geometric.")


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
        f"{type(module).__name__} has no message-passing layer (torch_geometric.nn.MessagePassing)."
        '\nInstead of adj_t @ x write self.sum = SimpleConv(aggr="sum") in __init__, and '
        "self.sum(x, adj_t) in forward; a model without a graph trains with another strategy.\n"
        f"Instead of messages by hand, such as scatter(x[row], col), write:\n{LAYER}"
    )
