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
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data

from lightning_gnnpipe._compat_pyg import method_of, slices_of
from lightning_gnnpipe._compat_torch import pytree
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

    slots: tuple[_Slot, _Slot | None, _Slot]  # edges, weight, nodes
    layout: torch.layout | None
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Count:
    """Placeholder of an integer that may be the number of graphs; `repr` omits its value."""

    value: int = field(repr=False)


class Slices(NamedTuple):
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
    counts: Mapping[str, int] = field(default_factory=dict)
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
        if len(slots) == 1:
            return self.leaves[slots[0]]
        with torch.inference_mode(False):  # inference tensors do not count writes
            return torch.cat([self.leaves[slot] for slot in slots], dim=1)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Cache key of the traced graph: names of tensors and values of options."""
        counts = () if self.has_graphs else tuple(self.counts.items())
        return self.method, self.names, repr(self.template), counts

    def rebuild(
        self, leaves: Sequence[Any], num_graphs: Any = None
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return `(args, kwargs)` with these tensors and, unless None, this number of graphs."""
        args, kwargs = _fill(self.template, leaves, num_graphs)
        return args, kwargs

    def run(self, module: nn.Module, leaves: Sequence[Any], num_graphs: Any = None) -> Any:
        """Call the method of `module` with these tensors; see `rebuild`."""
        args, kwargs = self.rebuild(leaves, num_graphs)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        views = {id(one): (k, dict(vars(one))) for k, one in given if isinstance(one, DataView)}

        def put(one: DataView) -> Any:
            key, old = views.get(id(one), (None, {}))
            new = {name: value for name, value in vars(one).items() if old.get(name) is not value}
            return one if key is None else ChangedGraph(key, new)

        return pytree.tree_map_only(DataView, put, getattr(module, self.method)(*args, **kwargs))

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


def is_of_pairs(name: str) -> bool:
    """Whether an argument holds pairs of nodes to score, or their labels, and no edges."""
    return last_name(name).startswith("edge_label")


def flatten_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_nodes: CountNodes | None = None,
    method: str = "forward",
    matrices: Matrices | None = None,
) -> Call:
    """Flatten the arguments of a method; refuse heterogeneous graphs.

    `matrices`: remembers the parts of sparse matrices from call to call. Arguments that do not fit
    the method raise Python's own error.
    """
    function = method_of(module, method)
    signature = inspect.signature(function)
    try:
        signature.bind(module, *args, **kwargs)
    except TypeError:
        function(module, *args, **kwargs)
        raise
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [n for n, one in signature.parameters.items() if one.kind <= positional][1:]
    names += [f"args.{i}" for i in range(len(names), len(args))]
    collector = _Collector(matrices or Matrices())
    filled = [collector.visit(name, one) for name, one in zip(names, args, strict=False)]
    named = {name: collector.visit(name, one) for name, one in kwargs.items()}
    return Call(
        tuple(collector.leaves),
        tuple(collector.names),
        (filled, named),
        collector.num_nodes,
        collector.counts,
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
        self.counts: dict[str, int] = {}
        self.slices: dict[int, Slices] = {}
        self.options: dict[str, Any] = {}

    def visit(self, name: str, value: Any) -> Any:
        """Return `value` with placeholders, in its lists, tuples and dicts too."""

        def put(path: tuple[Any, ...], one: Any) -> Any:
            return self._put(".".join([name, *(str(astuple(key)[0]) for key in path)]), one)

        return pytree.tree_map_with_path(put, value)

    def _put(self, name: str, value: Any) -> Any:
        """Return the placeholder of `value`, or a plain value itself."""
        if isinstance(value, EdgeIndex):
            value = value.as_tensor()
        if isinstance(value, Tensor) and value.layout is torch.strided:
            return self._add(name, value)
        if isinstance(value, Data):
            return self._put_graph(name, value)
        if is_matrix(value):
            return self._put_matrix(name, value)
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
            self.counts[name] = value
            return _Count(value)
        self.options[name] = value
        return value

    def _add(self, name: str, leaf: Tensor) -> _Slot:
        self.leaves.append(leaf)
        self.names.append(name)
        return _Slot(len(self.leaves) - 1)

    def _put_matrix(self, name: str, matrix: Any) -> _Matrix:
        entries, nodes = self._known.take_apart(name, matrix)
        edges, weight = self._add(f"{name}.edge_index", entries.edges), None
        if entries.weight is not None:
            weight = self._add(f"{name}.edge_weight", entries.weight)
        slot = self._add(f"{name}.nodes", nodes)
        self.matrices[slot.index] = name
        return _Matrix((edges, weight, slot), entries.layout, entries.dtype)

    def _put_graph(self, name: str, graph: Any) -> _Record:
        """Return the record of a graph; of a `Batch`, without lists and `follow_batch` vectors."""
        self.num_nodes, is_batch = graph.num_nodes, isinstance(graph, Batch)
        attributes: dict[str, Any] = {}
        for key, item in graph:
            slices = slices_of(graph, key) if is_batch else None
            is_followed = key.endswith(("_batch", "_ptr")) and slices is None
            is_left = key == "num_nodes" or isinstance(item, list) or is_followed
            if (is_batch and is_left) or not all(map(_is_usable, pytree.tree_leaves(item))):
                continue
            slot = attributes[key] = self.visit(f"{name}.{key}", item)
            if slices is not None and isinstance(slot, _Slot):
                starts, increments = slices
                if increments is not None and not increments.any():
                    increments = None
                self.slices[slot.index] = Slices(
                    starts, graph.__cat_dim__(key, item) or 0, increments
                )
        for key in COUNTS[:2] if is_batch else ():
            attributes[key] = self.visit(f"{name}.{key}", int(graph.num_graphs))
        return _Record(attributes)


def _is_usable(value: Any) -> bool:
    """Whether forward can use a value in a graph; unusable ones are dropped."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return True
    is_square = is_matrix(value) and value.size(0) == value.size(1)
    return is_square or isinstance(value, _PLAIN)


def _fill(template: Any, leaves: Sequence[Any], num_graphs: Any) -> Any:
    """Return `template` with values in place of placeholders."""

    def put(one: Any) -> Any:
        if isinstance(one, _Slot):
            return leaves[one.index]
        if isinstance(one, _Count):
            return one.value if num_graphs is None else num_graphs
        if isinstance(one, _Record):
            return DataView(_fill(one.attributes, leaves, num_graphs))
        if not isinstance(one, _Matrix):
            return one
        parts: Any = (*map(put, one.slots), one.layout, one.dtype)
        if isinstance(parts[0], fx.Proxy):
            return parts[0].tracer.create_proxy("call_function", assemble, parts, {})
        return assemble(*parts)

    return pytree.tree_map(put, template)
