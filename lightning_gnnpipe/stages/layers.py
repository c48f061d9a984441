"""Cuts a traced graph into layers: segments with one message-passing call each.

  leaf_0  lin  relu | conv_0  norm  relu  add | conv_1  norm  relu  add | conv_2  norm  lin  output
                    (never here)            ^ cut                     ^ cut

Between two calls, the cut goes where the fewest bytes per node are alive. All values alive there
cross the cut (h; GCNII's x_0; JumpingKnowledge's list), so that any cut can separate two stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.find import contains_passing
from lightning_gnnpipe.stages.reads import Reads
from lightning_gnnpipe.stages.segments import Segment, SegmentBuilder, is_named_random
from lightning_gnnpipe.stages.trace import line_of_node, root_of, strip_root
from lightning_gnnpipe.stages.values import Value
from lightning_gnnpipe.user_code import at

_REMEDY_OUTPUTS = (
    "Compute other results in training_step, where a single graph is also pooled, or choose a "
    "smaller module with GNNPipeStrategy(pipelined_module=...)."
)
_REMEDY_EDGES = (
    "Return z, the rows of nodes, and compute the rows of edges in training_step: "
    "z[edge_index[0]] * z[edge_index[1]]."
)
_REMEDY_SEVERAL = (
    "Return tensors, and leave return_attention_weights out. To get the weights, call the layer by "
    "itself after fit."
)

# Kinds of values with rows: these can cross a cut, and be outputs in a batch of graphs.
ROW_KINDS = (Kind.NODE, Kind.EDGE, Kind.GRAPH, Kind.NONEMPTY_PREFIX)


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model, in the order of execution.

    Attributes:
        crossing: For each segment, the earlier values that are alive where it begins.
        outputs: Names of the model's output tensors.
        output_template: Structure of the output, with `fx.Node`s in place of tensors.
        repeatable: Crossing values that any stage can compute from the batch, in the order of
            computation, mapped to the number of the segment that computes them.
        outside: Values that forward reads besides its arguments.
    """

    segments: tuple[Segment, ...]
    crossing: tuple[tuple[str, ...], ...]
    values: dict[str, Value]
    outputs: tuple[str, ...]
    output_template: Any
    repeatable: Mapping[str, int] = field(default_factory=dict)
    outside: Reads = field(default_factory=Reads, compare=False)

    def read_leaves(self) -> set[int]:
        """Return the numbers of the leaves that a layer reads or the model returns."""
        names = {*self.outputs, *(name for one in self.segments for name in one.inputs)}
        numbers = (name.removeprefix("leaf_") for name in names if name.startswith("leaf_"))
        return {int(number) for number in numbers if number.isdigit()}

    def num_calls(self, name: str) -> int:
        """Return how often the module `name` is called, by itself or inside a called module."""
        nodes = (node for one in self.segments for node in one.module.graph.nodes)
        called = [strip_root(str(node.target)) for node in nodes if node.op == "call_module"]
        return sum(f"{name}.".startswith(f"{target}.") for target in called)

    def rebuild_output(self, tensors: Sequence[Tensor]) -> Any:
        """Return the model's output; `tensors` are in the order of `outputs`."""
        by_name = dict(zip(self.outputs, tensors, strict=True))
        return _thaw(fx.node.map_arg(self.output_template, lambda node: by_name[node.name]))

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
    output_kinds: Collection[Kind] = (Kind.NODE,),
    remedy: str = "",
) -> Layers:
    """Cut `graph` into a segment per message-passing call; calls with no cut between share one.

    `output_kinds`: allowed row kinds of outputs. `remedy`: replaces the default advice if violated.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    output = next(node for node in graph.nodes if node.op == "output")
    outputs = _check_outputs(output, values, output_kinds, remedy)
    cutter = _Cutter(nodes, output, values)
    starts = cutter.starts(_find_calls(nodes, module, values))
    crossing = tuple(cutter.alive(start) for start in starts)
    ends = [*starts[1:], len(nodes)]
    segments = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        needed = crossing[index + 1] if index + 1 < len(starts) else outputs
        segments.append(cutter.segment(index, (start, end), needed, module))
    return Layers(tuple(segments), crossing, values, outputs, output.args[0])


def _find_calls(
    nodes: Sequence[fx.Node], module: nn.Module, values: Mapping[str, Value]
) -> list[int]:
    """Return the positions of calls of layers, and of products of a sparse matrix and rows."""
    root = root_of(module)
    matrices = {name for name, value in values.items() if value.kind is Kind.EDGE_INDEX}

    def passes(node: fx.Node) -> bool:
        if node.op == "call_module" and contains_passing(root.get_submodule(str(node.target))):
            return True
        is_rows = node.name in values and values[node.name].kind is Kind.NODE
        return is_rows and any(source.name in matrices for source in node.all_input_nodes)

    calls = [i for i, node in enumerate(nodes) if passes(node)]
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
    if value is None or "return_attention_weights" in line:
        return _REMEDY_SEVERAL
    return _REMEDY_EDGES if value.kind is Kind.EDGE else _REMEDY_OUTPUTS


def _find_free(nodes: Sequence[fx.Node], values: dict[str, Value]) -> set[fx.Node]:
    """Find cheap values that each segment recomputes: sizes, weights and transformed edges."""
    free: set[fx.Node] = set()
    for node in nodes:
        is_cheap = node.op in ("get_attr", "call_function", "call_method")
        sources_are_free = all(
            source.op == "placeholder" or source in free for source in node.all_input_nodes
        )
        is_rows = node.name in values and values[node.name].kind is Kind.NODE
        if is_cheap and not is_named_random(node) and sources_are_free and not is_rows:
            free.add(node)
    return free


class _Cutter:
    def __init__(self, nodes: Sequence[fx.Node], output: fx.Node, values: dict[str, Value]) -> None:
        self.nodes, self.values, self.free = nodes, values, _find_free(nodes, values)
        self.place = {node: i for i, node in enumerate(nodes)} | {output: len(nodes)}

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
