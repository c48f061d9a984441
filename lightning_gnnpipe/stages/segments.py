"""Segments of a traced graph as modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lightning_gnnpipe.passing import dropout
from lightning_gnnpipe.stages.shapes import WRITES, is_named_write


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer, or a part of it: a module whose positional inputs and outputs are named values."""

    index: int  # number of the layer, from 0
    module: fx.GraphModule
    inputs: tuple[str, ...]  # leaves (`leaf_0`) and values of earlier segments
    outputs: tuple[str, ...]  # values that later segments or the caller need
    has_inplace: bool  # it may overwrite its inputs

    @property
    def ends(self) -> dict[str, fx.Node]:
        """Node of each output; a placeholder if the segment passes an input on."""
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        return dict(zip(self.outputs, output.args[0], strict=True))


def leaves_of(segments: Iterable[Segment]) -> frozenset[str]:
    """Return the names of the leaves that `segments` read."""
    named = {name for segment in segments for name in segment.inputs}
    return frozenset(name for name in named if name.startswith("leaf_"))


def find_sources(ends: Collection[fx.Node]) -> set[fx.Node]:
    """Return `ends` and all nodes that they are computed from."""
    found, new = set(ends), list(ends)
    while new:
        new = [source for node in new for source in node.all_input_nodes if source not in found]
        found.update(new)
    return found


def part_of(segment: Segment, names: Sequence[str]) -> Segment:
    """Return the part of `segment` that computes only the outputs `names`."""
    kept = find_sources([segment.ends[name] for name in names])
    return _rebuild(segment, names, kept)


def without(segment: Segment, names: Set[str]) -> Segment:
    """Return `segment` without the outputs `names` and the inputs it only passed on to them."""
    if not names & set(segment.outputs):
        return segment
    outputs = [name for name in segment.outputs if name not in names]
    ends = [segment.ends[name] for name in outputs]
    nodes = [node for node in segment.module.graph.nodes if node.op != "output"]
    inner = {node for node in nodes if node.op != "placeholder"}
    kept = inner.union(ends, *(node.all_input_nodes for node in inner))
    return _rebuild(segment, outputs, kept)


def _rebuild(segment: Segment, outputs: Sequence[str], kept: Collection[fx.Node]) -> Segment:
    """Return a segment of only the nodes `kept`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in segment.module.graph.nodes:
        if node in kept:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[segment.ends[name]] for name in outputs))
    return _make_segment(segment.index, graph, outputs, segment.module)


def _make_segment(index: int, graph: fx.Graph, outputs: Iterable[str], root: nn.Module) -> Segment:
    """Return the segment that runs `graph`; its targets are looked up in `root`."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (functional.dropout, torch.dropout):
            node.target = dropout
    module = fx.GraphModule(root, graph)
    inputs = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    has_inplace = any(map(is_inplace, graph.nodes))
    return Segment(index, module, inputs, tuple(outputs), has_inplace)


def build_segment(
    index: int,
    body: Sequence[fx.Node],
    free: Set[fx.Node],
    results: Any,
    outputs: Iterable[str],
    root: nn.Module,
) -> Segment:
    """Return a segment that copies the nodes of `body` that are not in `free`.

    It returns `results`, nodes of the original graph in any structure. An operand that is not in
    `body` becomes a copy if in `free`, else an input.
    """
    graph, copies, own = fx.Graph(), dict[fx.Node, fx.Node](), set(body)
    last_input: fx.Node | None = None

    def copy_of(node: fx.Node) -> fx.Node:
        nonlocal last_input
        if node not in copies and (node in own or node in free):
            copies[node] = graph.node_copy(node, copy_of)
        elif node not in copies:
            with graph.inserting_after(last_input) if last_input else graph.inserting_before():
                copies[node] = last_input = graph.placeholder(node.name)
        return copies[node]

    for node in body:
        if node not in free:
            copy_of(node)
    graph.output(fx.node.map_arg(results, copy_of))
    return _make_segment(index, graph, outputs, root)


def is_inplace(node: fx.Node) -> bool:
    """Whether `node` overwrites its operands, as it did in the sample, or by its name."""
    return WRITES in node.meta or is_named_write(node)
