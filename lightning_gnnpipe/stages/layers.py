"""Cuts a traced graph into layers: segments with one message-passing call each.

  leaf_0  lin  relu | conv_0  norm  relu  add | conv_1  norm  relu  add | conv_2  norm  lin  output
                    (never here)            ^ cut                     ^ cut

Between two calls, the cut goes where the fewest bytes per node are alive. All values alive there
cross the cut (h; GCNII's x_0; JumpingKnowledge's list), so that any cut can separate two stages.

Code behind the last call that mixes rows, such as a readout or a decoder of pairs, is the head:
every rank runs it on all rows, as it does the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Call, Kind
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.find import contains_passing
from lightning_gnnpipe.stages.reads import Reads
from lightning_gnnpipe.stages.segments import (
    Segment,
    SegmentBuilder,
    find_sources,
    is_inplace,
)
from lightning_gnnpipe.stages.shapes import is_of_shapes
from lightning_gnnpipe.stages.tracer import is_named_random, line_of_node, root_of, strip_root
from lightning_gnnpipe.stages.values import LOOKS_UP, Value
from lightning_gnnpipe.user_code import at

_REMEDY_OUTPUTS = (
    "Compute other results from rows of nodes behind the last message-passing layer, where pools "
    "and decoders may stand, or choose a smaller module with "
    "GNNPipeStrategy(pipelined_module=...)."
)
_REMEDY_SEVERAL = (
    "Return tensors, and leave return_attention_weights out. To get the weights, call the layer by "
    "itself after fit."
)

# Functions that may mix rows of nodes, though their result has as many rows.
_ORDERS = ("argsort", "cumsum", "sort", "unique")
FREE = "is_free"  # mark of a node that each segment recomputes

# Kinds of values with rows: these can cross a cut. Outputs are of the first two, or all in a batch
# of graphs.
ROW_KINDS = (Kind.NODE, Kind.EDGE, Kind.GRAPH, Kind.NONEMPTY_PREFIX)


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model, in the order of execution.

    Attributes:
        crossing: For each segment, the earlier values that are alive where it begins.
        outputs: Names of the values that the last segment returns: those the head reads, or the
            model's output tensors.
        output_template: Structure of the output, with `fx.Node`s in place of tensors.
        repeatable: Crossing values that any stage can compute from the batch, in the order of
            computation, mapped to the number of the segment that computes them.
        outside: Values that forward reads besides its arguments.
        head: Computes the model's output from `outputs` and leaves; None if these are the output.
        num_rows: Numbers of nodes and edges that the trace depends on; empty for any graph.
        weights: Names of the parameters that are leaves, by the name of the leaf.
        whole: Runs the trace on all leaves, if some of them are no arguments.
    """

    segments: tuple[Segment, ...]
    crossing: tuple[tuple[str, ...], ...]
    values: dict[str, Value]
    outputs: tuple[str, ...]
    output_template: Any
    repeatable: Mapping[str, int] = field(default_factory=dict)
    outside: Reads = field(default_factory=Reads, compare=False)
    head: Segment | None = None
    num_rows: tuple[int, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    whole: fx.GraphModule | None = None

    def run_plain(self, module: nn.Module, call: Call) -> Any:
        """Run `module` on the leaves of `call`, or the trace if it reads more than arguments."""
        return call.run(module, call.leaves) if self.whole is None else self.whole(*call.leaves)

    @property
    def has_sums(self) -> bool:
        """Whether code between layers sums over all nodes."""
        return any(segment.sums for segment in self.segments)

    def read_leaves(self) -> set[int]:
        """Return the numbers of the leaves that a layer reads or the model returns."""
        names = {*self.outputs, *(name for one in self.segments for name in one.inputs)}
        numbers = (name.removeprefix("leaf_") for name in names if name.startswith("leaf_"))
        return {int(number) for number in numbers if number.isdigit()}

    def called(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts of `module` that segments call."""
        nodes = (node for one in self.segments for node in one.module.graph.nodes)
        names = [strip_root(str(node.target)) for node in nodes if node.op == "call_module"]
        return [module.get_submodule(name) for name in names]

    def num_calls(self, name: str) -> int:
        """Return how often the module `name` is called, by itself or inside a called module."""
        nodes = (node for one in self.segments for node in one.module.graph.nodes)
        called = [strip_root(str(node.target)) for node in nodes if node.op == "call_module"]
        return sum(f"{name}.".startswith(f"{target}.") for target in called)

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

    def pick_outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor per name in `outputs`; the flat output may repeat a tensor."""
        names: list[str] = []
        fx.node.map_arg(self.output_template, lambda node: names.append(node.name))
        by_name = dict(zip(names, tensors, strict=True))
        return [by_name[name] for name in self.outputs]


def cut_layers(
    graph: fx.Graph,
    module: nn.Module,
    values: dict[str, Value],
    output_kinds: Collection[Kind] = ROW_KINDS[:2],
    remedy: str = "",
) -> Layers:
    """Cut `graph` into a segment per message-passing call; calls with no cut between share one.

    `output_kinds`: allowed row kinds of outputs. `remedy`: replaces the default advice if violated.
    """
    nodes: Sequence[fx.Node] = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    output = next(node for node in graph.nodes if node.op == "output")
    calls = _find_calls(nodes, module, values)
    cutter = _Cutter(nodes, output, values, [nodes[call] for call in calls])
    end = None
    if Kind.GRAPH not in output_kinds:  # in a batch of graphs, pools run on chunks
        if not any(is_inplace(node, root_of(module)) for node in nodes):
            cutter.put_off()
        nodes, calls = cutter.nodes, [cutter.place[call] for call in cutter.calls]
        end = cutter.head(calls[-1], output_kinds)
    if end is None:
        outputs, end = _check_outputs(output, values, output_kinds, remedy), len(nodes)
        head = None
    else:
        outputs = cutter.alive(end)
        head = cutter.build_head(len(calls), end, module)
    starts = cutter.starts(calls)
    crossing = tuple(cutter.alive(start) for start in starts)
    ends = [*starts[1:], end]
    segments = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        needed = crossing[index + 1] if index + 1 < len(starts) else outputs
        segments.append(cutter.segment(index, (start, end), needed, module))
    return Layers(tuple(segments), crossing, values, outputs, output.args[0], head=head)


def _find_calls(
    nodes: Sequence[fx.Node], module: nn.Module, values: Mapping[str, Value]
) -> list[int]:
    """Return the positions of calls of layers, and of products of a sparse matrix and rows."""
    root, free = root_of(module), _find_free(nodes, values)
    matrices = {name for name, value in values.items() if value.kind is Kind.EDGE_INDEX}

    def passes(node: fx.Node) -> bool:
        if node.op == "call_module" and contains_passing(root.get_submodule(str(node.target))):
            return True
        results = [node] if node.name in values else node.users  # parts of a tuple
        of_nodes = (values[one.name].kind is Kind.NODE for one in results if one.name in values)
        if node in free or not any(of_nodes):
            return False
        sources = node.all_input_nodes
        return LOOKS_UP in node.meta or any(s in messages or s.name in matrices for s in sources)

    def is_message(node: fx.Node) -> bool:
        value = values.get(node.name)
        if value is None or value.kind is Kind.NODE:
            return False
        is_new = value.kind is Kind.EDGE and node not in free
        return is_new or LOOKS_UP in node.meta or not messages.isdisjoint(node.all_input_nodes)

    calls, messages = list[int](), set[fx.Node]()
    for i, node in enumerate(nodes):
        if passes(node):
            calls.append(i)
        elif is_message(node):
            messages.add(node)
    if not calls:
        raise UnsupportedError(
            expected="the forward of the pipelined module to call message-passing layers, or to "
            "multiply a sparse matrix that is an argument by rows of nodes",
            found=f"none in {type(module).__name__}",
            remedy="Choose the module that does with GNNPipeStrategy(pipelined_module=...).",
        )
    return calls


def _check_outputs(
    output: fx.Node, values: dict[str, Value], kinds: Collection[Kind], remedy: str
) -> tuple[str, ...]:
    found: dict[str, fx.Node] = {}
    fx.node.map_arg(output.args[0], lambda node: found.setdefault(node.name, node))
    rows = "per node" if Kind.GRAPH not in kinds else "per node, edge or graph of the batch"
    for name, node in found.items():
        if name not in values or values[name].kind not in kinds:
            raise UnsupportedError(
                expected=f"every output of the pipelined module to have one row {rows}",
                found=(
                    values[name].words
                    if name in values
                    else "a tuple, or another value that is no tensor"
                )
                + at(line_of_node(node)),
                remedy=remedy or _remedy(values.get(name), line_of_node(node)),
            )
    if not found:
        raise UnsupportedError(
            expected="the pipelined module to return tensors",
            found="none",
            remedy="Let forward return the rows of nodes that the loss needs.",
        )
    return tuple(found)


def _remedy(value: Value | None, line: str) -> str:
    is_attention = value is None or "return_attention_weights" in line
    return _REMEDY_SEVERAL if is_attention else _REMEDY_OUTPUTS


def _find_free(nodes: Sequence[fx.Node], values: Mapping[str, Value]) -> set[fx.Node]:
    """Find cheap values that each segment recomputes: sizes, weights and transformed edges."""
    free: set[fx.Node] = set()
    for node in nodes:
        is_cheap = node.op in ("get_attr", "call_function", "call_method")
        sources_are_free = all(
            source.op == "placeholder" or source in free for source in node.all_input_nodes
        )
        is_rows = node.name in values and values[node.name].row_kind == (Kind.NODE, 0)
        is_plain = is_cheap and not is_named_random(node) and sources_are_free and not is_rows
        if is_plain or FREE in node.meta:
            free.add(node)
    return free


class _Cutter:
    def __init__(
        self,
        nodes: Sequence[fx.Node],
        output: fx.Node,
        values: dict[str, Value],
        calls: Sequence[fx.Node],
    ) -> None:
        self.values, self.free = values, _find_free(nodes, values)
        self.output, self.calls = output, calls
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

    def starts(self, calls: Sequence[int]) -> list[int]:
        """First position of each segment."""
        starts = [0]
        for call, following in pairwise(calls):
            costs = {
                place: cost
                for place in range(call + 1, following + 1)
                if (cost := self._row_bytes(place)) is not None
            }
            if costs:
                starts.append(min(costs, key=lambda place: (costs[place], place)))
        return starts

    def _row_bytes(self, start: int) -> int | None:
        """Bytes per row of the values alive at `start`; None if one of them cannot cross."""
        total = 0
        for name in self.alive(start):
            value = self.values.get(name)
            if value is None or value.kind not in ROW_KINDS:
                return None
            total += value.row_bytes
        return total

    def head(self, last_call: int, kinds: Collection[Kind]) -> int | None:
        """First position of the head; None if the outputs are rows, and nothing mixes rows."""
        behind = range(last_call + 1, len(self.nodes))
        mixing = next((place for place in behind if self._mixes(self.nodes[place])), None)
        found = {node.name for node in self.output.all_input_nodes}
        if mixing is None and self._are_rows(found, kinds):
            return None
        last = len(self.nodes) if mixing is None else mixing
        costs = {
            place: sum(self.values[name].row_bytes for name in alive)
            for place in range(last_call + 1, last + 1)
            if (alive := self.alive(place)) and self._are_rows(alive, kinds)
        }
        return min(costs, key=lambda place: (costs[place], -place), default=None)

    def _are_rows(self, names: Collection[str], kinds: Collection[Kind]) -> bool:
        return all(name in self.values and self.values[name].kind in kinds for name in names)

    def _mixes(self, node: fx.Node) -> bool:
        """Whether rows of `node` are computed from several rows of the same or other kinds."""
        value = self.values.get(node.name)
        kinds = {kind for source in node.all_input_nodes for kind in self._row_kinds(source)}
        if kinds and str(node.target).rpartition(".")[2] in _ORDERS:
            return True
        if value is None or node in self.free:
            return False
        return bool(kinds - {value.row_kind})

    def _row_kinds(self, node: fx.Node) -> set[tuple[Kind, int]]:
        """What the rows of `node`, or of the tensors in it, count."""
        value = self.values.get(node.name)
        if value is not None and (value.row_kind is not None or FREE not in node.meta):
            return set() if value.row_kind is None else {value.row_kind}
        if is_of_shapes(node) or node in self.calls:  # what else a layer returns is unknown
            return set()
        return {kind for source in node.all_input_nodes for kind in self._row_kinds(source)}

    def build_head(self, index: int, start: int, module: nn.Module) -> Segment:
        """Build the head, which begins at position `start`."""
        builder = SegmentBuilder(self.free)
        for node in self.nodes[start:]:
            if node not in self.free:
                builder.copy(node)
        return builder.build_head(index, self.output, module)

    def segment(
        self, index: int, span: tuple[int, int], needed: tuple[str, ...], module: nn.Module
    ) -> Segment:
        """Build the segment of positions `span` with the outputs `needed`."""
        body = self.nodes[span[0] : span[1]]
        builder = SegmentBuilder(self.free)
        for node in body:
            if node not in self.free:
                builder.copy(node)
        by_name = {node.name: node for node in self.place}
        by_name |= {leaf.name: leaf for leaf in body[0].graph.nodes if leaf.op == "placeholder"}
        return builder.build(index, [by_name[name] for name in needed], module)


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
