"""Learns row kind, shape and dtype of each value of a traced graph from a run on a small sample.

A sample has different numbers of nodes, edges and graphs, so that the first dimension of a value
shows what its rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe._compat_pyg import MESH_CNN_CONV
from lightning_gnnpipe.calls import Call, GraphBatch, Inputs, Kind, draw_graphs
from lightning_gnnpipe.errors import UnsupportedError, first_line
from lightning_gnnpipe.passing import is_matrix
from lightning_gnnpipe.stages.attributes import undisturbed
from lightning_gnnpipe.stages.shapes import (
    UNKNOWN,
    Answer,
    Facts,
    is_shared,
    refuse_write,
    refusing_writes,
    with_rows,
)
from lightning_gnnpipe.stages.tracer import line_of_node, root_of
from lightning_gnnpipe.user_code import at

_REMEDY_SIZES = (
    "Take sizes from the arguments (x.size(0)) rather than from the whole graph, or train with "
    "num_chunks=1."
)
_REMEDY_ROWS = (
    "'{}' has one row for each of the {} {}. Read it in forward, and pass its rows to the layer as "
    "an argument, or train with num_chunks=1."
)
_REMEDY_SETS = (
    " An edge-level argument belongs to one edge set, by its number of rows or its name. Pass it "
    "twice to use it with two edge sets."
)
PARTS = "parts"  # mark of a node whose result is a tuple, see `_parts_of`
SIZES = "sizes"  # mark of a node whose result is a tensor: its shape in the sample
LEAF = "leaf"  # mark of a node that returns a leaf as it is, the number of which it is
SAMPLE_EDGES = 48
_GROUP = 4  # edges that MeshCNNConv reads together


@dataclass(frozen=True, slots=True)
class Value:
    """Row kind, edge set, row shape, dtype and differentiability of a tensor.

    `nodes_in`: the dimension of nodes if the first one counts nothing, as in states of an LSTM.
    """

    kind: Kind
    edge_set: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    nodes_in: int | None = None

    @property
    def row_kind(self) -> tuple[Kind, int] | None:
        """What its rows count, in whichever dimension; None without rows."""
        if self.nodes_in is not None:
            return Kind.NODE, 0
        return None if self.kind in (Kind.WHOLE, Kind.EDGE_INDEX) else (self.kind, self.edge_set)

    @property
    def words(self) -> str:
        """Description of its rows for a message."""
        if self.kind is Kind.EDGE_INDEX:
            return "a sparse matrix"
        if self.kind is Kind.WHOLE:
            return "a tensor without one row for each node, edge or graph"
        counted = "graph" if self.kind is Kind.NONEMPTY_PREFIX else self.kind.value
        return f"a tensor with one row {'an' if counted[0] == 'e' else 'a'} {counted}"

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.row_shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Sample:
    """A small part of the batch."""

    leaves: tuple[Tensor, ...]  # in the order of the call
    num_nodes: int
    edge_index: Tensor
    edge_sizes: tuple[int, ...]
    graphs: GraphBatch | None = None
    is_whole: bool = False  # it is the whole graph
    names: tuple[str, ...] = ()  # of the leaves, if some are no arguments

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """Arguments of the traced graph."""
        return self.leaves if self.graphs is None else (*self.leaves, self.graphs.num_graphs)

    @property
    def row_kinds(self) -> dict[int, tuple[Kind, int]]:
        """Map a number of rows to (kind, edge set); ambiguous numbers are left out.

        A whole graph has given sizes: there, the number of nodes always means nodes.
        """
        counted = [(self.num_nodes, Kind.NODE, 0)]
        counted += [(size, Kind.EDGE, number) for number, size in enumerate(self.edge_sizes)]
        if self.graphs is not None:
            counted += [(size, kind, 0) for size, kind in self.graphs.row_counts]
        if self.is_whole:
            counted = [one for one in counted[1:] if one[0] != self.num_nodes] + counted[:1]
        sizes = [size for size, _, _ in counted]
        return {size: (kind, n) for size, kind, n in counted if sizes.count(size) == 1}


def draw_sample(
    module: nn.Module, call: Call, inputs: Inputs, num_edges: int = SAMPLE_EDGES
) -> Sample:
    """Return some graphs of a batch of graphs, or about `num_edges` edges of a single graph.

    Sizes differ from each other and from widths of `module`'s parameters, so they are unambiguous.
    Integers of tensors without rows, such as pairs to score, count the nodes of the sample.
    """
    if inputs.graphs is None:
        return _draw_edges(module, call, inputs, num_edges)
    leaves, graphs = draw_graphs(module, call, inputs)
    sizes = tuple(len(rows) for rows in graphs.row_sets)
    return Sample(leaves, len(graphs.graph_of_node), inputs.edge_index, sizes, graphs)


def _draw_edges(module: nn.Module, call: Call, inputs: Inputs, num_edges: int) -> Sample:
    """Return evenly spaced edges, their nodes and a few more; whole groups for MeshCNNConv."""
    widths = {size for p in module.parameters() for size in p.shape}
    widths |= {size for leaf in _without_rows(call.leaves, inputs) for size in leaf.shape}
    group = _GROUP if any(isinstance(m, MESH_CNN_CONV) for m in module.modules()) else 1
    sets = torch.split(inputs.edge_index, list(inputs.edge_sizes), dim=1)
    drawn = [_spaced(edges, num_edges // len(sets), group) for edges in sets]
    extra = torch.arange(min(3, inputs.num_nodes), device=sets[0].device)
    while True:
        ends = [edges[:, some].flatten() for edges, some in zip(sets, drawn, strict=True)]
        nodes = torch.unique(torch.cat([*ends, extra]))
        counts = [some.numel() for some in drawn]
        longest = counts.index(max(counts))
        sizes = [nodes.numel(), *counts, *([sum(counts)] if len(counts) > 1 else [])]
        is_clear = len(set(sizes)) == len(sizes) and not widths & set(sizes)
        if is_clear or counts[longest] < 2 * group:
            break
        drawn[longest] = drawn[longest][:-group]
    renumber = torch.full((inputs.num_nodes,), -1, device=nodes.device)
    renumber[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    # With too few edges to drop, pad with isolated copies of the first node.
    used = widths | {*counts, sum(counts)}
    missing = next(n for n in count(0) if n + nodes.numel() not in used)
    nodes = torch.cat([nodes, nodes[:1].expand(missing)])
    local = [renumber[edges[:, some]] for edges, some in zip(sets, drawn, strict=True)]
    leaves = []
    for kind, number, leaf in zip(inputs.kinds, inputs.edge_sets, call.leaves, strict=True):
        rows = {Kind.NODE: nodes, Kind.EDGE: drawn[number]}.get(kind)
        part = local[number] if kind is Kind.EDGE_INDEX else leaf if rows is None else leaf[rows]
        if kind is Kind.WHOLE and leaf.dim() and leaf.dtype in (torch.int64, torch.int32):
            part = leaf % nodes.numel()
        part = part.clone() if part.is_inference() else part
        if rows is not None and part.dtype is torch.bool and not part.any():
            part[::2] = True  # a mask selects some rows
        leaves.append(part.detach().requires_grad_(leaf.requires_grad))
    edge_index = torch.cat(local, dim=1)
    return _sample(call, inputs, leaves, nodes.numel(), edge_index, tuple(counts))


def _without_rows(leaves: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    kinds = zip(leaves, inputs.kinds, strict=True)
    return tuple(leaf for leaf, kind in kinds if kind is Kind.WHOLE)


def whole_sample(call: Call, inputs: Inputs) -> Sample:
    """Return the whole graph, for modules that fail on a part of it."""
    leaves = tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in call.leaves)
    sample = _sample(call, inputs, leaves, inputs.num_nodes, inputs.edge_index, inputs.edge_sizes)
    return replace(sample, is_whole=True)


def _sample(
    call: Call, inputs: Inputs, leaves: Sequence[Tensor], num_nodes: int, edges: Tensor, sizes: Any
) -> Sample:
    return Sample(tuple(leaves), num_nodes, edges, sizes, names=call.names if call.held else ())


def _spaced(edges: Tensor, count: int, group: int) -> Tensor:
    """Return the numbers of about `count` of the edges, evenly spaced, in whole groups."""
    num_groups = edges.size(1) // group
    number = min(max(count // group, 2), num_groups)
    spaced = torch.arange(number, device=edges.device) * (num_groups - 1) // max(number - 1, 1)
    first = torch.unique(spaced) * group
    return (first[:, None] + torch.arange(group, device=first.device)).flatten()


def learn_values(
    graph: fx.Graph, module: nn.Module, sample: Sample, remedy: str = ""
) -> dict[str, Value]:
    """Run `graph` on `sample` and return a `Value` for each tensor, by node name."""
    values, kinds = dict[str, Value](), sample.row_kinds

    def note(node: fx.Node, result: Any) -> None:
        if is_matrix(result):
            flows = result.requires_grad
            flows = flows if isinstance(flows, bool) else flows()  # torch-sparse
            values[node.name] = Value(Kind.EDGE_INDEX, 0, (), torch.int64, flows)
        elif isinstance(result, Tensor):
            values[node.name] = _value_of(result, kinds if node.op != "get_attr" else {})
            node.meta[SIZES] = tuple(result.shape)
            same = [slot for slot, leaf in enumerate(sample.leaves) if leaf is result]
            if same and node.op != "placeholder":
                node.meta[LEAF] = same[0]
        elif parts := _parts_of(result):
            node.meta[PARTS] = parts

    _run_on(sample, graph, root_of(module), note, remedy)
    return values


def _parts_of(result: Any) -> Any:
    """Return the structure of nested tuples of tensors, () for a tensor; None for all else."""
    if isinstance(result, Tensor):
        return ()
    parts = tuple(map(_parts_of, result)) if type(result) is tuple else (None,)
    return None if None in parts else parts


def _value_of(tensor: Tensor, kinds: Mapping[int, tuple[Kind, int]]) -> Value:
    """Return the `Value` of `tensor`; `kinds` maps numbers of rows to what they count."""
    counted = [kinds.get(size, (Kind.WHOLE, 0)) for size in tensor.shape] or [(Kind.WHOLE, 0)]
    kind, number = counted[0]
    dims = [dim for dim, (other, _) in enumerate(counted) if dim and other is Kind.NODE]
    if kind is Kind.NODE and dims:  # [num_nodes, num_nodes]: each row sees all nodes
        kind, dims = Kind.WHOLE, []
    nodes_in = dims[0] if kind is Kind.WHOLE and len(dims) == 1 else None
    shape = tuple(tensor.shape[1:])
    return Value(kind, number, shape, tensor.dtype, tensor.requires_grad, nodes_in)


def learn_facts(
    graph: fx.Graph,
    root: nn.Module,
    samples: Iterable[Sample],
    num_rows: Callable[[Kind, int], int] | None,
    pairs: Collection[int],
    remedy: str,
) -> dict[str, Answer]:
    """Run `graph` on `samples` of different sizes; return what depends on shapes only.

    `root`: see `root_of`. `num_rows`: of the whole graph; None in a batch of graphs. `pairs`: sizes
    that change with each call.
    """
    facts: Facts | None = None
    for sample in samples:
        counted: dict[int, tuple[int, Any]] = {size: (size, UNKNOWN) for size in pairs}
        counted |= {
            size: (size if num_rows is None else num_rows(*kind), kind)
            for size, kind in sample.row_kinds.items()
        }
        facts = Facts(counted.get, facts)
        _run_on(sample, graph, root, facts.note, remedy)
    return {} if facts is None else facts.answers


def _run_on(
    sample: Sample,
    graph: fx.Graph,
    root: nn.Module,
    note: Callable[[fx.Node, Any], None],
    remedy: str,
) -> None:
    """Run `graph` on `sample` and call `note` with each node and its result."""
    running: list[fx.Node] = []
    outside = (*sample.leaves, *root.parameters(), *root.buffers())

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            running.append(n)
            if n.target is with_rows and is_shared(n, self.env, outside, running):
                raise refuse_write(f"rows of a tensor that shares memory{at(line_of_node(n))}")
            result = super().run_node(n)
            note(n, result)
            return result

    no_writes = refusing_writes(sample.leaves, sample.names)
    runner = Recorder(fx.GraphModule(root, graph))
    runner.extra_traceback = False  # no fx node in error texts
    try:
        with undisturbed(root), torch.enable_grad(), no_writes:
            runner.run(*sample.arguments)
    except UnsupportedError:
        raise
    except Exception as error:
        line = line_of_node(running[-1]) if running else ""
        raise UnsupportedError(
            expected="the model to run on a small part of the graph",
            found=f"{type(error).__name__}: {first_line(error)}{at(line)}",
            remedy=remedy,
        ) from error


def remedy_for_size(module: nn.Module, inputs: Inputs) -> str:
    """Return advice for a module that does not run on a small part of the graph."""
    remedy = remedy_for_weights(module, inputs)
    return (remedy or _REMEDY_SIZES) + (_REMEDY_SETS if len(inputs.edge_sizes) > 1 else "")


def remedy_for_weights(module: nn.Module, inputs: Inputs) -> str:
    """Return advice for layers with weights of single nodes or edges; empty if there are none."""
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(module.get_submodule(name.rpartition(".")[0]), MessagePassing):
            continue
        size = weight.size(0) if weight.dim() else -1
        if size in (inputs.num_nodes, *inputs.edge_sizes):
            what = "nodes" if size == inputs.num_nodes else "edges"
            return _REMEDY_ROWS.format(name, size, what)
    return ""
