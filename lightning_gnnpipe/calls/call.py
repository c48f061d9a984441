"""The arguments of one call of the pipelined module, taken apart and put together again.

    forward(x, edge_index, edge_attr=None)   ->  leaves x, edge_index            and a template
    forward(data)                            ->  leaves data.x, data.edge_index  and a template

Whatever is not a tensor stays in the template as it is, so that tracing sees real values for
options. The number of graphs is no option: it is another in each micro-batch of whole graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData

from lightning_gnnpipe._compat_pyg import slices_of
from lightning_gnnpipe.errors import UnsupportedError, explain


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the tensor leaf with this number."""

    index: int


@dataclass(frozen=True, slots=True)
class _Record:
    """Stands for a PyG `Data`: its attributes, by name."""

    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Count:
    """Stands for a number that may be the number of graphs."""

    value: int = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """How a tensor of a PyG `Batch` was put together from those of its graphs.

    Attributes:
        starts: `[num_graphs + 1]` where the rows of each graph begin.
        dim: The dimension that they are rows in.
        raised: `[num_graphs]` what was added to each graph's numbers; None for nothing.
    """

    starts: Tensor
    dim: int
    raised: Tensor | None


CountNodes = Callable[[], int | None]

COUNTS = ("num_graphs", "batch_size", "size")
"""Names of arguments that hold the number of graphs, where there is a batch vector."""

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
            rows = self.batch if self.x is None else self.x
            return rows.size(0)
        if name == "num_edges":
            return self.edge_index.size(1)
        if name in ("num_features", "num_node_features"):
            return self.x.size(-1)
        if name in _OPTIONAL:
            return None
        raise AttributeError(f"the graph has no dense tensor or plain value '{name}'")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return self.__dict__.get(name) is not None


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its tensors, their names, and a template for everything else.

    Attributes:
        num_nodes: As a PyG `Data` among the arguments says.
        counts: By name, what is the number of graphs where there is a batch vector.
        slices: By leaf, how it was put together from the graphs of a PyG `Batch`.
        arguments: As they came: `(args, kwargs)`.
        is_one_graph: Whether there is one graph, whatever batch vector comes with it.
        batch_nodes: Returns the nodes of the user's batch, for a call without a tensor of nodes.
    """

    leaves: tuple[Tensor, ...]
    names: tuple[str, ...]
    template: Any
    num_nodes: int | None
    counts: tuple[tuple[str, int], ...] = ()
    slices: Mapping[int, Slices] = field(default_factory=dict)
    arguments: tuple[Sequence[Any], Mapping[str, Any]] = field(default=((), {}), repr=False)
    is_one_graph: bool = False
    batch_nodes: CountNodes | None = None

    @property
    def batch_vector(self) -> Tensor | None:
        """The graph of each node, if that is among the arguments."""
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if is_batch_name(name) and leaf.dim() == 1 and not leaf.is_floating_point():
                return leaf
        return None

    @property
    def has_graphs(self) -> bool:
        """Whether there is a batch of graphs, with a batch vector."""
        return not self.is_one_graph and self.batch_vector is not None

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for a traced graph to be used again: names and values of options."""
        return self.names, repr(self.template), () if self.has_graphs else self.counts

    def rebuild(
        self, leaves: Sequence[Any], num_graphs: Any = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return `(args, kwargs)` with `leaves` in the tensors' places, `num_graphs` in theirs."""
        args, kwargs = _fill(self.template, leaves, num_graphs)
        return list(args), kwargs


def with_batch_vector(call: Call, graph_of_node: Tensor) -> Call:
    """Return the call as if `graph_of_node`, `[num_nodes]`, were an argument that forward ignores.

    Forward need not know of graphs to be run on one after the other.
    """
    names, leaves = (*call.names, "batch"), (*call.leaves, graph_of_node)
    return replace(call, names=names, leaves=leaves)


def is_batch_name(name: str) -> bool:
    """Whether a tensor of this name is a batch vector."""
    return _last(name) == "batch"


def flatten_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_nodes: CountNodes | None = None,
) -> Call:
    """Take the arguments of `module.forward(*args, **kwargs)` apart.

    Args:
        module: The pipelined module.
        args: Positional arguments.
        kwargs: Arguments by name.
        batch_nodes: Returns the nodes of the user's batch, if that is known.

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
        tuple(collector.counts),
        collector.slices,
        (args, kwargs),
        batch_nodes=batch_nodes,
    )


class _Collector:
    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.names: list[str] = []
        self.num_nodes: int | None = None
        self.counts: list[tuple[str, int]] = []
        self.slices: dict[int, Slices] = {}

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
        if isinstance(value, Batch):
            return self._visit_batch(name, value)
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
        if isinstance(value, int) and type(value) is not bool and _last(name) in COUNTS:
            self.counts.append((name, value))
            return _Count(value)
        return value

    def _visit_batch(self, name: str, batch: Any) -> _Record:
        """Return the record of several graphs; what is kept in lists, such as names, is left out.

        So are the batch vectors of single attributes (`follow_batch`).
        """
        self.num_nodes = batch.num_nodes
        attributes: dict[str, Any] = {}
        for key, item in batch:
            is_followed = key.endswith(("_batch", "_ptr")) and slices_of(batch, key) is None
            if key == "num_nodes" or isinstance(item, list) or is_followed or not _is_usable(item):
                continue
            attributes[key] = self.visit(f"{name}.{key}", item)
            found = slices_of(batch, key)
            if found is not None and isinstance(attributes[key], _Slot):
                dim = batch.__cat_dim__(key, item)
                self.slices[attributes[key].index] = Slices(found[0], dim or 0, _offsets(found[1]))
        for key in COUNTS[:2]:
            attributes[key] = self.visit(f"{name}.{key}", int(batch.num_graphs))
        return _Record(attributes)


def _offsets(increments: Tensor | None) -> Tensor | None:
    """Return what was added to the numbers of each graph; None if nothing was."""
    if increments is None or not increments.any():
        return None
    return increments


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _is_usable(value: Any) -> bool:
    """Whether an attribute of a graph can take part; the others are as if they were not there."""
    if isinstance(value, list | tuple):
        return all(_is_usable(item) for item in value)
    if isinstance(value, dict):
        return all(_is_usable(item) for item in value.values())
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense or isinstance(value, (*_PLAIN, EdgeIndex))


def _fill(template: Any, leaves: Sequence[Any], num_graphs: Any) -> Any:
    if isinstance(template, _Slot):
        return leaves[template.index]
    if isinstance(template, _Count):
        return template.value if num_graphs is None else num_graphs
    if isinstance(template, _Record):
        return DataView(_fill(template.attributes, leaves, num_graphs))
    if isinstance(template, dict):
        return {key: _fill(item, leaves, num_graphs) for key, item in template.items()}
    if isinstance(template, list | tuple):
        items = [_fill(item, leaves, num_graphs) for item in template]
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
