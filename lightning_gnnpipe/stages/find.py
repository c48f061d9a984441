"""Finds the pipelined module, the smallest one with a forward that holds all message passing.

A module that torch.fx cannot trace lists its layers in a method `pipeline_layers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.errors import ConfigError, UnsupportedError


def contains_passing(module: nn.Module) -> bool:
    """Whether `module` is or holds a message-passing layer."""
    return any(isinstance(m, MessagePassing) for m in module.modules())


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


def run_listed(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the listed layers in order and return the outputs of the last one."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
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


def find_pipelined(module: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """Find the module to pipeline; return its name, empty for `module` itself, and the module."""
    if name is not None:
        try:
            chosen = module.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                expected="'pipelined_module' to name a submodule of the LightningModule",
                found=repr(name),
                remedy="Its submodules are: "
                f"{', '.join(child for child, _ in module.named_children())}.",
            ) from error
        _check_passing(chosen)
        return name, chosen
    _check_passing(module)
    return _descend("", module)


def _descend(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    holders = _find_holders(module)
    if len(holders) == 1:
        child_name, child = holders[0]
        if not isinstance(child, MessagePassing):
            found = _descend(f"{name}.{child_name}" if name else child_name, child)
            if not _is_container(found[1]):
                return found
    if not name and not _has_forward(module):
        raise UnsupportedError(
            expected="all trainable message-passing layers in one submodule, or in the "
            "LightningModule's own forward",
            found=" and ".join(f"'{child}'" for child, _ in holders),
            remedy="Choose one with GNNPipeStrategy(pipelined_module=...): each device then "
            "runs the rest whole. Or write a forward of the LightningModule that calls all of "
            "them, and call it in training_step.",
        )
    return name, module


def _find_holders(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return submodules that hold message passing, without second names of the same layers.

    If `module` has no forward and one holder is trainable, frozen holders (teachers) are left out.
    """
    held = {
        (name, child): {id(m) for m in child.modules() if isinstance(m, MessagePassing)}
        for name, child in module.named_children()
        if contains_passing(child)
    }
    holders = [
        (name, child)
        for (name, child), layers in held.items()
        if not any(_repeats(child, layers, other, all_) for (_, other), all_ in held.items())
    ]
    trained = [one for one in holders if any(p.requires_grad for p in one[1].parameters())]
    return trained if len(trained) == 1 and not _has_forward(module) else holders


def _repeats(child: nn.Module, layers: set[int], other: nn.Module, all_layers: set[int]) -> bool:
    """Whether `child` is a second name for layers that `other` holds and calls."""
    if child is other or _is_container(other) or not layers <= all_layers:
        return False
    return _is_container(child) or layers != all_layers or any(m is child for m in other.modules())


def _has_forward(module: nn.Module) -> bool:
    """Whether `module` defines a forward of its own, or lists its layers."""
    defined_in = type(module).forward.__module__.partition(".")[0]
    return defined_in not in ("torch", "lightning", "pytorch_lightning") or is_listed(module)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _check_passing(module: nn.Module) -> None:
    if not contains_passing(module):
        raise UnsupportedError(
            expected="a module with message-passing layers (torch_geometric.nn.MessagePassing)",
            found=f"none in {type(module).__name__}",
            remedy="Build the layers in __init__. Train a model without message passing with "
            "another strategy.",
        )
