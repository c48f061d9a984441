"""Flatten the arguments of a call of the pipelined module, and rebuild them.

    forward(x, edge_index, edge_attr=None)   ->  leaves x, edge_index            and a template
    forward(data)                            ->  leaves data.x, data.edge_index  and a template
    forward(x, adj)                          ->  leaves x, and the parts of a sparse matrix

Values that are not tensors stay in the template, so that tracing sees the real options. Only the
number of graphs gets a placeholder, because it changes with each micro-batch of whole graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData

from lightning_gnnpipe._compat_pyg import slices_of
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import Matrices, assemble, is_matrix


@dataclass(frozen=True, slots=True)
class _Slot:
    """Placeholder of tensor leaf `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class _Record:
    """Placeholder of a PyG `Data`."""

    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Placeholder of a sparse matrix: the arguments of `assemble`."""

    edges: _Slot
    weight: _Slot | None
    nodes: _Slot
    layout: torch.layout | None
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Count:
    """Placeholder of an integer that may be the number of graphs; `repr` omits its value."""

    value: int = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """How a PyG `Batch` concatenated a tensor from its graphs."""

    starts: Tensor  # [num_graphs + 1] first row of each graph
    dim: int  # of the rows
    increments: Tensor | None  # [num_graphs, *] added to each graph's values; None for 0


CountNodes = Callable[[], int | None]

# Names of arguments that hold the number of graphs, where there is a batch vector.
COUNTS = ("num_graphs", "batch_size", "size")

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

# Attributes that PyG's `Data` returns as None if they are not set.
_OPTIONAL = ("x", "edge_index", "edge_weight", "edge_attr", "y", "pos", "batch", "time", "ptr")


class DataView:
    """Replaces a PyG `Data` while a module is traced or run on a chunk."""

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


class ChangedGraph(NamedTuple):
    """A PyG `Data` that forward returns: its argument, and the attributes that forward has set."""

    argument: int | str
    attributes: dict[str, Any]


def _changed(result: Any, graphs: Sequence[tuple[int | str, DataView, dict[str, Any]]]) -> Any:
    """Return `result` with `ChangedGraph` in place of `graphs`: argument, graph, old attributes."""
    if type(result) in (list, tuple):
        return type(result)(_changed(one, graphs) for one in result)
    for key, graph, old in graphs:
        if result is graph:
            return ChangedGraph(key, {n: v for n, v in vars(graph).items() if old.get(n) is not v})
    return result


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its tensors, their names, and a template for all other arguments.

    Attributes:
        method: Name of the module's method that is called.
        num_nodes: Of a PyG `Data` among the arguments, else None.
        counts: Names and values that are the number of graphs if there is a batch vector.
        slices: By leaf index, for tensors of a PyG `Batch`.
        options: Plain values among the arguments, by name.
        arguments: The original `(args, kwargs)`.
        is_one_graph: Whether all nodes belong to one graph, whatever the batch vector says.
        batch_nodes: Returns the number of nodes in the user's batch, for a call without node rows.
        matrices: Names of sparse matrices, by the leaf with one row per row of the matrix.
        held: Names of parameters and buffers that are leaves behind the arguments, by number.
        weights: The parameters among them.
    """

    leaves: tuple[Tensor, ...]
    names: tuple[str, ...]
    template: Any
    num_nodes: int | None
    counts: tuple[tuple[str, int], ...] = ()
    slices: Mapping[int, Slices] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Sequence[Any], Mapping[str, Any]] = field(default=((), {}), repr=False)
    is_one_graph: bool = False
    batch_nodes: CountNodes | None = None
    method: str = "forward"
    matrices: Mapping[int, str] = field(default_factory=dict)
    held: Mapping[int, str] = field(default_factory=dict)
    weights: Mapping[int, str] = field(default_factory=dict)

    @property
    def batch_vector(self) -> Tensor | None:
        """The graph of each node, if it is among the arguments."""
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if last_name(name) == "batch" and leaf.dim() == 1 and not leaf.is_floating_point():
                return leaf
        return None

    @property
    def has_graphs(self) -> bool:
        """Whether the call has a batch of graphs, with a batch vector."""
        return not self.is_one_graph and self.batch_vector is not None

    def join(self, slots: Sequence[int]) -> Tensor:
        """Return the edges of these leaves, concatenated, `[2, num_edges]`."""
        edges = [self.leaves[slot] for slot in slots]
        if len(edges) == 1:
            return edges[0]
        with torch.inference_mode(False):  # inference tensors do not count writes
            return torch.cat(edges, dim=1)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Cache key of the traced graph: names of tensors and values of options."""
        counts = () if self.has_graphs else self.counts
        return self.method, self.names, repr(self.template), counts

    def rebuild(
        self, leaves: Sequence[Any], num_graphs: Any = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return `(args, kwargs)` with these tensors and, unless None, this number of graphs."""
        args, kwargs = fill(self.template, leaves, num_graphs)
        return list(args), kwargs

    def run(self, module: nn.Module, leaves: Sequence[Any], num_graphs: Any = None) -> Any:
        """Call the method of `module` with these tensors; see `rebuild`."""
        args, kwargs = self.rebuild(leaves, num_graphs)
        given = (dict(enumerate(args)) | kwargs).items()
        graphs = [(key, one, dict(vars(one))) for key, one in given if isinstance(one, DataView)]
        return _changed(getattr(module, self.method)(*args, **kwargs), graphs)

    def with_held(self, held: Mapping[str, Tensor], num_nodes: int | None) -> Call:
        """Return the call with these parameters and buffers of the module as more leaves."""
        slots = dict(enumerate(held, len(self.leaves)))
        return replace(
            self,
            leaves=(*self.leaves, *held.values()),
            names=(*self.names, *(f"module.{name}" for name in held)),
            num_nodes=num_nodes,
            held=slots,
            weights={i: name for i, name in slots.items() if isinstance(held[name], nn.Parameter)},
        )


def last_name(name: str) -> str:
    """Return the last part of a name such as "data.edge_index"."""
    return name.rsplit(".", 1)[-1]


def flatten_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_nodes: CountNodes | None = None,
    method: str = "forward",
    matrices: Matrices | None = None,
) -> Call:
    """Flatten the arguments of a method; refuse heterogeneous graphs.

    `matrices`: remembers the parts of sparse matrices from call to call.
    """
    collector = _Collector(matrices or Matrices())
    names = _parameter_names(getattr(type(module), method), len(args))
    filled_args = tuple(collector.visit(name, arg) for name, arg in zip(names, args, strict=True))
    filled_kwargs = {name: collector.visit(name, arg) for name, arg in kwargs.items()}
    return Call(
        tuple(collector.leaves),
        tuple(collector.names),
        (filled_args, filled_kwargs),
        collector.num_nodes,
        tuple(collector.counts),
        collector.slices,
        collector.options,
        (args, kwargs),
        batch_nodes=batch_nodes,
        method=method,
        matrices=collector.matrices,
    )


class _Collector:
    def __init__(self, known: Matrices) -> None:
        self._known = known
        self.matrices: dict[int, str] = {}
        self.leaves: list[Tensor] = []
        self.names: list[str] = []
        self.num_nodes: int | None = None
        self.counts: list[tuple[str, int]] = []
        self.slices: dict[int, Slices] = {}
        self.options: dict[str, Any] = {}

    def visit(self, name: str, value: Any) -> Any:
        """Return `value` with its tensors replaced by slots."""
        if isinstance(value, EdgeIndex):
            value = value.as_tensor()
        if isinstance(value, Tensor) and value.layout is torch.strided:
            return self._add(name, value)
        if isinstance(value, Batch) and not isinstance(value, HeteroData):
            return self._visit_batch(name, value)
        if isinstance(value, Data):
            self.num_nodes = value.num_nodes
            usable = {key: item for key, item in value if _is_usable(item)}
            return _Record({key: self.visit(f"{name}.{key}", i) for key, i in usable.items()})
        if isinstance(value, dict):
            return {key: self.visit(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.visit(f"{name}.{i}", item) for i, item in enumerate(value)]
            return _sequence_like(value, items)
        if is_matrix(value):
            return self._visit_matrix(name, value)
        if not isinstance(value, _PLAIN):
            kind = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise UnsupportedError(
                expected=f"argument '{name}' of the pipelined module to be a plain value, a dense "
                "tensor or a sparse matrix (torch.sparse_csr, _csc, _coo)",
                found=f"a {kind}",
                remedy="Pass 'edge_index' of shape [2, num_edges], and edge weights, or the "
                "tensors of a graph: net(data.x, data.edge_index).",
            )
        if isinstance(value, int) and type(value) is not bool and last_name(name) in COUNTS:
            self.counts.append((name, value))
            return _Count(value)
        self.options[name] = value
        return value

    def _add(self, name: str, leaf: Tensor) -> _Slot:
        self.leaves.append(leaf)
        self.names.append(name)
        return _Slot(len(self.leaves) - 1)

    def _visit_matrix(self, name: str, matrix: Any) -> _Matrix:
        entries, nodes = self._known.take_apart(name, matrix)
        edges, weight = self._add(f"{name}.edge_index", entries.edges), None
        if entries.weight is not None:
            weight = self._add(f"{name}.edge_weight", entries.weight)
        slot = self._add(f"{name}.nodes", nodes)
        self.matrices[slot.index] = name
        return _Matrix(edges, weight, slot, entries.layout, entries.dtype)

    def _visit_batch(self, name: str, batch: Any) -> _Record:
        """Return the record of a `Batch`, without list attributes and `follow_batch` vectors."""
        self.num_nodes = batch.num_nodes
        attributes: dict[str, Any] = {}
        for key, item in batch:
            slices = slices_of(batch, key)
            is_followed = key.endswith(("_batch", "_ptr")) and slices is None
            if key == "num_nodes" or isinstance(item, list) or is_followed or not _is_usable(item):
                continue
            slot = attributes[key] = self.visit(f"{name}.{key}", item)
            if slices is not None and isinstance(slot, _Slot):
                starts, increments = slices
                if increments is not None and not increments.any():
                    increments = None
                dim = batch.__cat_dim__(key, item) or 0
                self.slices[slot.index] = Slices(starts, dim, increments)
        for key in COUNTS[:2]:
            attributes[key] = self.visit(f"{name}.{key}", int(batch.num_graphs))
        return _Record(attributes)


def _sequence_like(value: Any, items: list[Any]) -> Any:
    """Return `items` as a list, tuple or named tuple, as `value` is."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _is_usable(value: Any) -> bool:
    """Whether forward can use an attribute of a graph; unusable ones are dropped."""
    if isinstance(value, list | tuple | dict):
        return all(map(_is_usable, value.values() if isinstance(value, dict) else value))
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    if is_dense or isinstance(value, (*_PLAIN, EdgeIndex)):
        return True
    return is_matrix(value) and bool(value.size(0) == value.size(1))


def fill(template: Any, leaves: Sequence[Any], num_graphs: Any = None) -> Any:
    """Return `template` with tensors in its slots."""
    if isinstance(template, _Slot):
        return leaves[template.index]
    if isinstance(template, _Count):
        return template.value if num_graphs is None else num_graphs
    if isinstance(template, _Matrix):
        slots = (template.edges, template.weight, template.nodes)
        edges, weight, nodes = (None if slot is None else leaves[slot.index] for slot in slots)
        arguments: Any = (edges, weight, nodes, template.layout, template.dtype)
        if isinstance(edges, fx.Proxy):
            return edges.tracer.create_proxy("call_function", assemble, arguments, {})
        return assemble(*arguments)
    if isinstance(template, _Record):
        return DataView(fill(template.attributes, leaves, num_graphs))
    if isinstance(template, dict):
        return {key: fill(item, leaves, num_graphs) for key, item in template.items()}
    if isinstance(template, list | tuple):
        return _sequence_like(template, [fill(item, leaves, num_graphs) for item in template])
    return template


def _parameter_names(method: Callable[..., Any], count: int) -> list[str]:
    names = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        names.append(parameter.name)
    return (names + [f"args.{i}" for i in range(len(names), count)])[:count]
