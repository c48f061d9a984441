"""Cuts a traced graph into layers: segments with one message-passing call each.

Between two calls, the cut goes where the fewest bytes per node are alive, of equal places to the
last: a layer is a convolution with the norm, activation and dropout behind it. All values alive
there cross the cut (h; GCNII's x_0; JumpingKnowledge's list), so that any cut can separate two
stages.

Code behind the last call that mixes rows, such as a readout or a decoder of pairs, is the head:
every rank runs it on all rows, as it does the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.find import calls_passing
from lightning_gnnpipe.stages.mixing import (
    attends,
    find_structure,
    multiplies,
    orders,
    refuse_indices,
    refuse_mixing,
    refuse_turned,
)
from lightning_gnnpipe.stages.segments import (
    Segment,
    build_segment,
    find_sources,
    is_inplace,
)
from lightning_gnnpipe.stages.shapes import is_of_shapes, line_of_node
from lightning_gnnpipe.stages.trace import is_named_random, root_of, strip_root
from lightning_gnnpipe.stages.values import Value
from lightning_gnnpipe.user_code import at

_REMEDY_OUTPUTS = (
    "Compute other results from rows of nodes behind the last message-passing layer, where pools "
    "and decoders may stand, or choose a smaller module with "
    "GNNPipeStrategy(pipelined_module=...)."
)
_REMEDY_SEVERAL = (
    "Return tensors. Give a layer whose attention weights are returned add_self_loops=False, and "
    "edge_index the loops; or call the layer by itself after fit."
)

FREE = "is_free"  # mark of a node that each segment recomputes

# Kinds of values with rows: these can cross a cut. Outputs are of the first two, or all in a batch
# of graphs.
ROW_KINDS = (Kind.NODE, Kind.EDGE, Kind.GRAPH, Kind.NONEMPTY_PREFIX)


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model, in the order of execution."""

    segments: tuple[Segment, ...]
    crossing: tuple[tuple[str, ...], ...]  # for each segment, earlier values alive where it begins
    values: dict[str, Value]
    outputs: tuple[str, ...]  # values that the last segment returns, for the head if there is one
    output_template: Any  # structure of the output, with `fx.Node`s in place of tensors
    # Crossing values that any stage can compute from the batch, in the order of computation, mapped
    # to the number of the segment that computes them.
    repeatable: Mapping[str, int] = field(default_factory=dict)
    trace: str = ""  # text of the traced graph
    head: Segment | None = None  # computes the model's output from `outputs` and leaves
    weights: Mapping[str, str] = field(default_factory=dict)  # names of parameters, by their leaf
    written: frozenset[str] = frozenset()  # names of buffers that forward changes
    is_of_whole: bool = False  # traced on the whole graph, since it fails on a part

    def read_leaves(self) -> set[int]:
        """Return the numbers of the leaves that a layer reads or the model returns."""
        names = {*self.outputs, *(name for one in self.segments for name in one.inputs)}
        numbers = (name.removeprefix("leaf_") for name in names if name.startswith("leaf_"))
        return {int(number) for number in numbers if number.isdigit()}

    def called(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts of `module` that segments call."""
        return list(map(module.get_submodule, self._called_names()))

    def num_calls(self, name: str) -> int:
        """Return how often the module `name` is called, by itself or inside a called module."""
        return sum(f"{name}.".startswith(f"{target}.") for target in self._called_names())

    def _called_names(self) -> list[str]:
        nodes = (node for one in self.segments for node in one.module.graph.nodes)
        return [strip_root(str(node.target)) for node in nodes if node.op == "call_module"]

    def rebuild_output(self, tensors: Sequence[Tensor], leaves: Sequence[Tensor] = ()) -> Any:
        """Return the model's output; `tensors` are in the order of `outputs`."""
        by_name = dict(zip(self.outputs, tensors, strict=True))
        if self.head is None:
            return _thaw(fx.node.map_arg(self.output_template, lambda node: by_name[node.name]))
        by_name |= {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}
        given = [by_name[name] for name in self.head.inputs]
        if self.head.has_inplace:
            given = [one.clone() if one.is_floating_point() else one for one in given]
        return _thaw(self.head.module(*given))


def cut_layers(
    graph: fx.Graph,
    module: nn.Module,
    values: dict[str, Value],
    output_kinds: Collection[Kind] = ROW_KINDS[:2],
    remedy: str = "",
    edges: Collection[str] | None = None,
    draws: Collection[str] = (),
    edge_counts: Collection[int] = (),
) -> Layers:
    """Cut `graph` into a segment per message-passing call; calls with no cut between share one.

    `output_kinds`: allowed row kinds of outputs. `remedy`: replaces the default advice if violated.
    `edges`: leaves with edges of a graph that is cut into chunks; None if it is not. `draws`:
    names of nodes that draw random numbers. `edge_counts`: numbers of edges in the sample.
    """
    nodes: Sequence[fx.Node] = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    output = next(node for node in graph.nodes if node.op == "output")
    root, free = root_of(module), _find_free(nodes, values, draws)
    calls = [node for node in nodes if calls_passing(node, root)]
    if not calls:
        raise UnsupportedError(
            expected="the forward of the pipelined module to call message-passing layers",
            found=f"none in {type(module).__name__}",
            remedy="Choose the module that does with GNNPipeStrategy(pipelined_module=...).",
        )
    cutter = _Cutter(nodes, output, values, calls, free, root)
    end = None
    if Kind.GRAPH not in output_kinds:  # in a batch of graphs, pools run on chunks
        if not any(map(is_inplace, nodes)):
            cutter.put_off()
        end = cutter.head(output_kinds)
    nodes, head = cutter.nodes, None
    if Kind.GRAPH not in output_kinds:
        inner = find_sources([*calls, *(n for n in nodes[:end] if n not in free)]) - {*calls}
        between = [n for n in graph.nodes if n not in calls]
        structure = None if edges is None else find_structure(between, values, edges)
        if edges is not None:
            refuse_turned(calls, values, root)
        drawn = set[fx.Node]()
        for node in graph.nodes:
            if node.name in draws or not drawn.isdisjoint(node.all_input_nodes):
                drawn.add(node)
        inside = [n for n in nodes if n in inner]
        refuse_indices(inside, values, structure, edge_counts, drawn)
        refuse_mixing(inside, values, root, structure)
    if end is None:
        outputs, end = _check_outputs(output, values, output_kinds, remedy), len(nodes)
    else:
        outputs = cutter.alive(end)
        head = build_segment(len(calls), nodes[end:], free, output.args[0], (), root)
    starts = cutter.starts()
    crossing = tuple(cutter.alive(start) for start in starts)
    by_name = {node.name: node for node in graph.nodes}
    spans = zip(pairwise([*starts, end]), [*crossing[1:], outputs], strict=True)
    segments = tuple(
        build_segment(i, nodes[slice(*span)], free, tuple(map(by_name.get, names)), names, root)
        for i, (span, names) in enumerate(spans)
    )
    return Layers(segments, crossing, values, outputs, output.args[0], head=head)


def _check_outputs(
    output: fx.Node, values: dict[str, Value], kinds: Collection[Kind], remedy: str
) -> tuple[str, ...]:
    found: dict[str, fx.Node] = {}
    fx.node.map_arg(output.args[0], lambda node: found.setdefault(node.name, node))
    rows = "per node" if Kind.GRAPH not in kinds else "per node, edge or graph of the batch"
    for name, node in found.items():
        value, line = values.get(name), line_of_node(node)
        if value is not None and value.kind in kinds:
            continue
        words = "a tuple, or another value that is no tensor" if value is None else value.words
        is_attention = value is None or "return_attention_weights" in line
        raise UnsupportedError(
            expected=f"every output of the pipelined module to have one row {rows}",
            found=words + at(line),
            remedy=remedy or (_REMEDY_SEVERAL if is_attention else _REMEDY_OUTPUTS),
        )
    if not found:
        raise UnsupportedError(
            expected="the pipelined module to return tensors",
            found="none",
            remedy="Let forward return the rows of nodes that the loss needs.",
        )
    return tuple(found)


def _find_free(
    nodes: Sequence[fx.Node], values: Mapping[str, Value], draws: Collection[str]
) -> set[fx.Node]:
    """Find cheap values that each segment recomputes: sizes, weights and transformed edges."""
    free: set[fx.Node] = set()
    for node in nodes:
        is_cheap = node.op in ("get_attr", "call_function", "call_method")
        is_rows = node.name in values and values[node.name].row_kind == (Kind.NODE, 0)
        is_random = is_named_random(node) or node.name in draws
        is_plain = is_cheap and not is_rows and not is_random
        sources = (one for one in node.all_input_nodes if one.op != "placeholder")
        if FREE in node.meta or (is_plain and free.issuperset(sources)):
            free.add(node)
    return free


class _Cutter:
    def __init__(
        self,
        nodes: Sequence[fx.Node],
        output: fx.Node,
        values: dict[str, Value],
        calls: Sequence[fx.Node],
        free: Set[fx.Node],
        root: nn.Module,
    ) -> None:
        self.values, self.free, self.output, self.calls = values, free, output, calls
        self.root = root
        self._set_order(nodes)

    def _set_order(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.place = {node: i for i, node in enumerate(nodes)} | {self.output: len(nodes)}

    def put_off(self) -> None:
        """Put what mixes rows, such as a readout of each layer, behind what does not read it."""
        needed = find_sources(self.calls)
        late: dict[fx.Node, None] = {}
        for node in self.nodes:
            is_late = self._mixes(node) or any(source in late for source in node.all_input_nodes)
            if is_late and node not in needed and node not in self.free:
                late[node] = None
        self._set_order([*(node for node in self.nodes if node not in late), *late])

    def alive(self, start: int) -> tuple[str, ...]:
        """Names of the values computed before position `start` and used from there on."""
        return tuple(
            node.name
            for node in self.nodes[:start]
            if node not in self.free and any(self._is_used_from(u, start) for u in node.users)
        )

    def _is_used_from(self, user: fx.Node, start: int) -> bool:
        if user in self.free:  # each segment that needs it recomputes it
            return any(self._is_used_from(later, start) for later in user.users)
        return self.place[user] >= start

    def starts(self) -> list[int]:
        """First position of each segment."""
        starts = [0]
        for call, following in pairwise(self.calls):
            places = range(self.place[call] + 1, self.place[following] + 1)
            if costs := self._row_bytes(places, ROW_KINDS):
                starts.append(min(reversed(costs), key=costs.__getitem__))
        return starts

    def _row_bytes(self, places: Iterable[int], kinds: Collection[Kind]) -> dict[int, int]:
        """Bytes per row of the values alive at each of `places` where they are rows of `kinds`."""
        alive = {place: self.alive(place) for place in places}
        return {
            place: sum(self.values[name].row_bytes for name in names)
            for place, names in alive.items()
            if self._are_rows(names, kinds)
        }

    def head(self, kinds: Collection[Kind]) -> int | None:
        """First position of the head; None if the outputs are rows, and nothing mixes rows."""
        first = self.place[self.calls[-1]] + 1
        behind = range(first, len(self.nodes))
        mixing = next((place for place in behind if self._mixes(self.nodes[place])), None)
        found = {node.name for node in self.output.all_input_nodes}
        if mixing is None and self._are_rows(found, kinds):
            return None
        last = len(self.nodes) if mixing is None else mixing
        costs = self._row_bytes(filter(self.alive, range(first, last + 1)), kinds)
        return min(reversed(costs), key=costs.__getitem__, default=None)

    def _are_rows(self, names: Collection[str], kinds: Collection[Kind]) -> bool:
        return all(name in self.values and self.values[name].kind in kinds for name in names)

    def _mixes(self, node: fx.Node) -> bool:
        """Whether rows of `node` are computed from several rows of the same or other kinds."""
        value = self.values.get(node.name)
        kinds = {kind for source in node.all_input_nodes for kind in self._row_kinds(source)}
        if orders(node, self.values):
            return True
        if node not in self.calls and (
            multiplies(node, self.values) or attends(node, self.values, self.root)
        ):
            return True
        return value is not None and node not in self.free and bool(kinds - {value.row_kind})

    def _row_kinds(self, node: fx.Node) -> set[tuple[Kind, int]]:
        """What the rows of `node`, or of the tensors in it, count."""
        value = self.values.get(node.name)
        if value is not None and (value.row_kind is not None or FREE not in node.meta):
            return set() if value.row_kind is None else {value.row_kind}
        if is_of_shapes(node) or node in self.calls:  # what else a layer returns is unknown
            return set()
        return {kind for source in node.all_input_nodes for kind in self._row_kinds(source)}


def _thaw(value: Any) -> Any:
    """Return `value` with mutable dicts and lists in place of fx's immutable ones."""
    if isinstance(value, dict):
        return {key: _thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_thaw(item) for item in value]
    if isinstance(value, tuple):
        items = [_thaw(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
