"""Modules that say themselves how they are cut, for forwards that cannot be traced.

    class Net(nn.Module):
        def pipeline_layers(self):
            return [
                (self.encoder, "x -> h"),
                (self.blocks[0], "h, edge_index -> h, skip"),
                (self.blocks[1], "h, skip, edge_index -> out"),
            ]

Each entry is a submodule and what it reads and computes, as in `torch_geometric.nn.Sequential`: the
names are those of forward's parameters and of what earlier entries computed; the last entry's
outputs are the model's. The submodules are called as they are, whatever they do inside, and layers
are cut between those that pass messages. Forward itself must compute the same: it is compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_gnnpipe.errors import UnsupportedError, explain


def is_listed(module: Any) -> bool:
    """Whether `module` lists its layers."""
    return hasattr(module, "pipeline_layers")


def listed_parts(module: Any) -> set[int]:
    """Return the ids of the listed submodules and of all modules inside of them."""
    if not is_listed(module):
        return set()
    return {id(part) for layer, _ in _entries(module) for part in layer.modules()}


def _entries(module: Any) -> list[tuple[nn.Module, str]]:
    """Return the listed layers.

    Raises:
        UnsupportedError: If an entry is not a submodule and what it reads and computes.
    """
    own = {id(part) for part in module.modules()}
    entries = list(module.pipeline_layers())
    for entry in entries:
        is_pair = isinstance(entry, tuple | list) and len(entry) == 2
        if not is_pair or id(entry[0]) not in own or str(entry[1]).count("->") != 1:
            raise UnsupportedError(
                explain(
                    expected="'pipeline_layers' to list pairs of a submodule of the module and a "
                    "text such as 'h, edge_index -> h'",
                    found=repr(entry),
                    remedy="Register the submodules in __init__.",
                )
            )
    return [(layer, str(text)) for layer, text in entries]


def run_listed(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the listed layers one after the other and return what the last one computes.

    Raises:
        UnsupportedError: If an entry reads a name that is not there.
    """
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    values = dict(bound.arguments)
    outputs: list[str] = []
    for layer, text in _entries(module):
        inputs, outputs = ([name.strip() for name in side.split(",")] for side in text.split("->"))
        missing = [name for name in inputs if name not in values]
        if missing:
            raise UnsupportedError(
                explain(
                    expected=f"'{text}' to read parameters of forward or earlier outputs",
                    found=", ".join(missing),
                    remedy=f"Known there are {', '.join(values)}.",
                )
            )
        result = layer(*(values[name] for name in inputs))
        parts = [result] if len(outputs) == 1 else [result[i] for i in range(len(outputs))]
        values.update(zip(outputs, parts, strict=True))
    return values[outputs[0]] if len(outputs) == 1 else tuple(values[name] for name in outputs)
