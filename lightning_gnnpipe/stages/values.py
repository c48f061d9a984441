"""Learns row kind, shape and dtype of each value of a traced graph from a run on a small sample.

A sample has different numbers of nodes, edges and graphs, so that the first dimension of a value
shows what its rows are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe._compat_torch import leaves_behind, node_of, pytree, version_of
from lightning_gnnpipe.calls import Call, GraphBatch, Inputs, Kind, draw_graphs, is_of_pairs
from lightning_gnnpipe.errors import UnsupportedError, first_line
from lightning_gnnpipe.passing import is_matrix
from lightning_gnnpipe.stages.attributes import Snapshot, random_states, undrawn
from lightning_gnnpipe.stages.shapes import (
    ANSWER,
    UNKNOWN,
    WRITES,
    answer_to,
    is_named_write,
    line_of_node,
    place_of,
)
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
TURNED = "turned"  # mark of a node that turns the edges of a leaf
LEAF = "leaf"  # mark of a node that returns a leaf as it is, the number of which it is
_TRANSPOSES = {"t", "transpose"}
_PRODUCTS = {"matmul": (1,), "mm": (1,), "linear": (1, 2), "embedding": (1,), "addmm": (2,)}
SAMPLE_EDGES = 48
_NEAR = 2**20  # edges among which neighbours of drawn ones are looked for


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


def draw_samples(module: nn.Module, call: Call, inputs: Inputs) -> tuple[Sample, ...]:
    """Return a sample, and one of fewer edges; of a batch of graphs only one."""
    nums = (SAMPLE_EDGES, SAMPLE_EDGES // 2)[: 1 if inputs.graphs else 2]
    return tuple([draw_sample(module, call, inputs, num) for num in nums])


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
    """Return evenly spaced edges, their nodes and a few more."""
    widths = {size for p in module.parameters() for size in p.shape}
    widths |= {size for leaf in _without_rows(call.leaves, inputs) for size in leaf.shape}
    sets = torch.split(inputs.edge_index, list(inputs.edge_sizes), dim=1)
    drawn = [_spaced(edges, num_edges // len(sets)) for edges in sets]
    extra = torch.arange(min(3, inputs.num_nodes), device=sets[0].device)
    while True:
        ends = [edges[:, some].flatten() for edges, some in zip(sets, drawn, strict=True)]
        nodes = torch.unique(torch.cat([*ends, extra]))
        counts = [some.numel() for some in drawn]
        longest = counts.index(max(counts))
        sizes = [nodes.numel(), *counts, *([sum(counts)] if len(counts) > 1 else [])]
        is_clear = len(set(sizes)) == len(sizes) and not widths & set(sizes)
        if is_clear or counts[longest] < 2:
            break
        drawn[longest] = drawn[longest][:-1]
    if ends[0].numel():  # PyG's median needs messages to the first node
        nodes = nodes.roll(-int((nodes == ends[0][-1]).nonzero()))
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
        part = part.clone() if part is leaf or part.is_inference() else part
        if rows is not None and part.dtype is torch.bool and part.numel() > 1:
            if not part.any():
                part[::2] = True  # a mask selects some rows
            elif part.all():
                part[-1] = False  # and not all
        leaves.append(part.detach().requires_grad_(leaf.requires_grad))
    edge_index = torch.cat(local, dim=1)
    return Sample(tuple(leaves), nodes.numel(), edge_index, tuple(counts))


def _without_rows(leaves: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    kinds = zip(leaves, inputs.kinds, strict=True)
    return tuple(leaf for leaf, kind in kinds if kind is Kind.WHOLE)


def whole_sample(call: Call, inputs: Inputs) -> Sample:
    """Return the whole graph, for modules that fail on a part of it."""
    leaves = tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in call.leaves)
    edges, sizes = inputs.edge_index, inputs.edge_sizes
    return Sample(leaves, inputs.num_nodes, edges, sizes, is_whole=True)


def _spaced(edges: Tensor, count: int) -> Tensor:
    """Return the numbers of about `count` of the edges, most of them evenly spaced.

    Some edges have a source in common, and some start where an edge ends: on a matching, numbers of
    neighbours would all be 1.
    """
    number = min(max(count, 2), edges.size(1))
    shared = number // 8
    number -= 3 * shared
    spaced = torch.arange(number, device=edges.device) * (edges.size(1) - 1)
    found = torch.unique(spaced // max(number - 1, 1))
    near, more = edges[:, :_NEAR], [found]
    for source, target in near[:, found[found < _NEAR][:shared]].t().tolist():
        alike = (near[0] == source).nonzero().flatten()[:2]
        onward = (near[0] == target).nonzero().flatten()[:1]
        more += [alike, onward]
    return torch.unique(torch.cat(more))


class _Run(fx.Interpreter):
    """Runs single nodes on one sample; `env` keeps their results."""

    def __init__(self, root: nn.Module, call: Call, sample: Sample) -> None:
        super().__init__(root, garbage_collect_values=False, graph=fx.Graph())
        self.args_iter = iter(sample.arguments)
        self._rows = {id(call.leaves[slot]): sample.leaves[slot] for slot in call.held}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = self.fetch_attr(target)
        return self._rows.get(id(found), found)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        def value(one: fx.Node) -> Any:
            is_whole = one.op == "get_attr" and bool(self._rows) and is_product(n, one)
            return self.fetch_attr(str(one.target)) if is_whole else self.env[one]

        return fx.node.map_arg(args, value)


class SampleRun:
    """Runs each node on small samples as it is traced, and notes what its result is.

    samples: One, or two of different sizes: sizes that differ are no widths.
    values: Of the first sample, by node name.
    is_shared: Several ranks share the layers, and sum gradients of the weights that these hold.
    draws: Names of nodes that draw random numbers.
    changers: Names of nodes that change buffers of modules.
    written: Names of these buffers in the trace.
    writers: By the name of a node, the names of those that overwrite its result.
    """

    def __init__(
        self, samples: Sequence[Sample], call: Call, remedy: str = "", *, is_shared: bool = False
    ) -> None:
        self.sample, self._samples, self._is_shared = samples[0], samples, is_shared
        self._call, self._remedy, self._kinds = call, remedy, samples[0].row_kinds
        named = zip(call.names, call.leaves, strict=True)  # numbers of pairs change with each call
        self._pairs = {leaf.size(-1) for name, leaf in named if is_of_pairs(name) and leaf.dim()}
        self.is_running = False
        self.has_failed = False  # on a sample

    def begin(self, root: nn.Module) -> None:
        """Start anew; `root`: see `root_of`."""
        self._root, self._failed = root, list[tuple[Exception, fx.Node]]()
        self._runs = [_Run(root, self._call, sample) for sample in self._samples]
        self._versions = [version_of(leaf) for leaf in self.sample.leaves]
        outside = (*self.sample.leaves, *root.parameters(), *root.buffers())
        self._devices = {one.device for one in outside if one.is_cuda}
        self.values: dict[str, Value] = {}
        self.draws, self.changers, self.written = set[str](), set[str](), set[str]()
        self.writers = defaultdict[str, set[str]](set)

    def again(self, graph: fx.Graph) -> None:
        """Run all of `graph` anew."""
        self.begin(self._root)
        for node in graph.nodes:
            self.run(node)

    def run(self, node: fx.Node) -> None:
        """Run `node`, whose operands have run."""
        if node.op == "output":
            return
        first, *rest = self._runs
        try:
            versions = self._versions_now()
            values = pytree.tree_leaves([*first.env.values()])
            ends = {node_of(one) for one in values if isinstance(one, Tensor)}
            result = self._result(first, node)
            if self._is_shared and node.op == "call_module":
                self._check_weights(node, result, ends)
        except (UnsupportedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._refuse(error, node) from error
        for one, version in self._versions_now().items():
            if versions[one] != version:
                self.writers[one.name].add(node.name)
                node.meta[WRITES] = True
        if is_named_write(node) and isinstance(node.args[0], fx.Node):  # perhaps of x.data
            place = place_of(first.env[node.args[0]])
            same = (one for one, value in first.env.items() if place and place_of(value) == place)
            for one in same:
                self.writers[one.name].add(node.name)
        first.env[node] = result
        for other in rest:
            try:
                other.env[node] = self._result(other, node)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # raised if a question needs it
                self._failed.append((error, node))
        self._note(node, result)

    def _check_weights(self, node: fx.Node, result: Any, ends: set[Any]) -> None:
        """Refuse a layer that reads a weight of another one; `ends`: nodes of its inputs."""
        layer = self._root.get_submodule(str(node.target))
        held = set(map(id, layer.parameters()))
        results = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        for leaf in leaves_behind(results, ends):
            if id(leaf) not in held:
                raise UnsupportedError(
                    expected="layers to hold the weights that they read, on several devices",
                    found=f"a {type(layer).__name__} that reads one of shape {list(leaf.shape)} "
                    f"of another module{at(line_of_node(node))}",
                    remedy="Register it in the layer as well: self.shared = shared in __init__. "
                    "Ranks sum the gradients of weights that several layers hold.",
                )

    def check_writes(self) -> None:
        """Refuse writes to leaves that are no arguments."""
        named = zip(self.sample.leaves, self._call.names, self._versions, strict=True)
        for slot, (leaf, name, version) in enumerate(named):
            if slot in self._call.held and version_of(leaf) != version:
                raise UnsupportedError(
                    f"Forward writes to '{name}', which is no argument.\nA chunk has only some of "
                    "its rows.\nWrite to a copy, h = x.clone(), and change what the module holds "
                    "in hooks such as on_train_batch_start."
                )

    def _result(self, run: _Run, node: fx.Node) -> Any:
        part = nn.Module()
        if node.op == "call_module":
            part = self._root.get_submodule(str(node.target))
        before, self.is_running = Snapshot(part), True
        buffers = {name: (one, version_of(one)) for name, one in part.named_buffers()}
        try:
            with undrawn(self._devices), torch.enable_grad():
                numbers = random_states(self._devices)
                result = run.run_node(node)
                if numbers != random_states(self._devices):
                    self.draws.add(node.name)
        finally:
            self.is_running = False
            before.restore()
        for name, one in part.named_buffers():
            old, version = buffers.get(name, (None, 0))
            if old is not one or version != version_of(one):
                self.changers.add(node.name)
                self.written.add(f"{node.target}.{name}")
        return result

    def _versions_now(self) -> dict[fx.Node, int]:
        results = self._runs[0].env.items()
        return {node: version_of(one) for node, one in results if isinstance(one, Tensor)}

    def _note(self, node: fx.Node, result: Any) -> None:
        if is_matrix(result):
            flows = result.requires_grad
            flows = flows if isinstance(flows, bool) else flows()  # torch-sparse
            self.values[node.name] = Value(Kind.EDGE_INDEX, 0, (), torch.int64, flows)
        elif isinstance(result, Tensor):
            kinds = self._kinds if node.op != "get_attr" else {}
            self.values[node.name] = _value_of(result, kinds)
            node.meta[SIZES] = tuple(result.shape)
            leaves = self.sample.leaves
            same = [slot for slot, leaf in enumerate(leaves) if leaf is result]
            if same and node.op not in ("placeholder", "get_attr"):
                node.meta[LEAF] = same[0]
            if result.dim() == 2 and any(_turns(leaf, result) for leaf in leaves):
                node.meta[TURNED] = True
        elif parts := _parts_of(result):
            node.meta[PARTS] = parts
        if (answer := answer_to(node, result, self._rows_of)) is not None:
            node.meta[ANSWER] = answer

    def _rows_of(self, node: fx.Node) -> Any:
        """Return what the sizes of `node` count, see `Answer.rows`."""
        results = [run.env.get(node) for run in self._runs]
        if not all(isinstance(one, Tensor) for one in results):
            if self._failed and isinstance(results[0], Tensor):
                raise self._refuse(*self._failed[0])
            return UNKNOWN
        shapes = [cast(Tensor, one).shape for one in results]
        if len({*map(len, shapes)}) > 1:
            return UNKNOWN
        return tuple([self._counted(*sizes) for sizes in zip(*shapes, strict=True)])

    def _counted(self, size: int, *sizes: int) -> Any:
        is_fixed = size not in self._pairs and all(other == size for other in sizes)
        return self._kinds.get(size, None if is_fixed else UNKNOWN)

    def _refuse(self, error: Exception, node: fx.Node) -> UnsupportedError:
        self.has_failed = True
        return UnsupportedError(
            expected="the model to run on a small part of the graph",
            found=f"{type(error).__name__}: {first_line(error)}{at(line_of_node(node))}",
            remedy=self._remedy,
        )


def is_product(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` multiplies rows by `node`, or transposes it, maybe to do so."""
    name = getattr(user.target, "__name__", user.target)
    places = _PRODUCTS.get(str(name), ())
    return name in _TRANSPOSES or any(user.args[i : i + 1] == (node,) for i in places)


def is_transpose(node: fx.Node) -> bool:
    """Whether `node` transposes its operand."""
    return getattr(node.target, "__name__", node.target) in _TRANSPOSES


def _turns(leaf: Tensor, other: Tensor) -> bool:
    """Whether `other` holds the edges of `leaf`, turned."""
    is_index = leaf.dtype is torch.int64 and leaf.dim() == 2 and leaf.size(0) == 2
    return is_index and torch.equal(leaf.flip(0), other) and not torch.equal(leaf, other)


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
