"""The arguments of one call of the pipelined module, taken apart and put together again.

    forward(x, edge_index, edge_attr=None)   ->  leaves x, edge_index            and a template
    forward(data)                            ->  leaves data.x, data.edge_index  and a template

Whatever is not a tensor stays in the template as it is, so that tracing sees real values for
options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from lightning_gnnpipe.errors import UnsupportedError, explain


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the tensor leaf with this number."""

    index: int


@dataclass(frozen=True, slots=True)
class _Record:
    """Stands for a PyG `Data`: its attributes, by name."""

    attributes: dict[str, Any]


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

# What PyG's `Data` gives as None where it is not set.
_OPTIONAL = ("x", "edge_index", "edge_weight", "edge_attr", "y", "pos", "batch", "time", "ptr")


class DataView:
    """Stands for a PyG `Data` while a module is traced or run on a chunk.

    It has the attributes, and `num_nodes`.
    """

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name == "num_nodes":
            return self.x.size(0)
        if name == "num_edges":
            return self.edge_index.size(1)
        if name in ("num_features", "num_node_features"):
            return self.x.size(-1)
        if name in _OPTIONAL:
            return None
        raise AttributeError(f"the graph has no '{name}'")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return self.__dict__.get(name) is not None


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its tensors, their names, and a template for everything else."""

    leaves: tuple[Tensor, ...]
    names: tuple[str, ...]
    template: Any
    num_nodes: int | None

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for a traced graph to be used again: names and values of options."""
        return self.names, repr(self.template)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return `(args, kwargs)` with `leaves` in the tensors' places."""
        args, kwargs = _fill(self.template, leaves)
        return list(args), kwargs


def take_apart(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Take the arguments of `module.forward(*args, **kwargs)` apart.

    Raises:
        UnsupportedError: If an argument is a heterogeneous graph or a sparse adjacency matrix.
    """
    collector = _Collector()
    names = _parameter_names(type(module).forward, len(args))
    filled_args = tuple(collector.visit(name, arg) for name, arg in zip(names, args, strict=True))
    filled_kwargs = {name: collector.visit(name, arg) for name, arg in kwargs.items()}
    return Call(
        tuple(collector.leaves),
        tuple(collector.names),
        (filled_args, filled_kwargs),
        collector.num_nodes,
    )


class _Collector:
    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.names: list[str] = []
        self.num_nodes: int | None = None

    def visit(self, name: str, value: Any) -> Any:
        """Return `value` with slots for its tensors."""
        if isinstance(value, EdgeIndex):
            value = value.as_tensor()
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise _not_supported(name, f"a {value.layout} tensor")
            self.leaves.append(value)
            self.names.append(name)
            return _Slot(len(self.leaves) - 1)
        if isinstance(value, HeteroData) or type(value).__name__ == "SparseTensor":
            raise _not_supported(name, f"a {type(value).__name__}")
        if isinstance(value, Data):
            self.num_nodes = value.num_nodes
            usable = {key: item for key, item in value if _is_usable(item)}
            return _Record({key: self.visit(f"{name}.{key}", i) for key, i in usable.items()})
        if isinstance(value, dict):
            return {key: self.visit(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.visit(f"{name}.{i}", item) for i, item in enumerate(value)]
            return type(value)(items) if not hasattr(value, "_fields") else type(value)(*items)
        if not isinstance(value, _PLAIN):
            raise _not_supported(name, f"a {type(value).__name__}")
        return value


def _is_usable(value: Any) -> bool:
    """Whether an attribute of a graph can take part; the others are as if they were not there."""
    if isinstance(value, list | tuple):
        return all(_is_usable(item) for item in value)
    if isinstance(value, dict):
        return all(_is_usable(item) for item in value.values())
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense or isinstance(value, (*_PLAIN, EdgeIndex))


def _fill(template: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(template, _Slot):
        return leaves[template.index]
    if isinstance(template, _Record):
        return DataView({key: _fill(item, leaves) for key, item in template.attributes.items()})
    if isinstance(template, dict):
        return {key: _fill(item, leaves) for key, item in template.items()}
    if isinstance(template, list | tuple):
        items = [_fill(item, leaves) for item in template]
        return type(template)(items) if not hasattr(template, "_fields") else type(template)(*items)
    return template


def _parameter_names(forward: Callable[..., Any], count: int) -> list[str]:
    names = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        names.append(parameter.name)
    return (names + [f"args.{i}" for i in range(len(names), count)])[:count]


def _not_supported(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            expected=f"argument '{name}' of the pipelined module to be a plain value or "
            "a dense tensor, 'edge_index' of "
            "shape [2, num_edges]",
            found=found,
            remedy="Pass 'edge_index' (and edge weights) instead of a sparse adjacency matrix; "
            "drop T.ToSparseTensor().",
        )
    )
