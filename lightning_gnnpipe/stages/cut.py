"""Traces the user's module and cuts it into layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind, is_of_pairs
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.layers import FREE, ROW_KINDS, Layers, cut_layers
from lightning_gnnpipe.stages.mixing import turn_leaves
from lightning_gnnpipe.stages.repeat import find_repeatable
from lightning_gnnpipe.stages.shapes import (
    Answer,
    Questions,
    dim_asked,
    mark,
    shape_like,
    size_asked,
)
from lightning_gnnpipe.stages.trace import trace
from lightning_gnnpipe.stages.tracer import root_of
from lightning_gnnpipe.stages.values import (
    LEAF,
    PARTS,
    SAMPLE_EDGES,
    SIZES,
    Sample,
    Value,
    draw_sample,
    learn_facts,
    learn_values,
    remedy_for_size,
    remedy_for_weights,
    whole_sample,
)

Result = TypeVar("Result")


def cut_module(
    module: nn.Module,
    call: Call,
    inputs: Inputs,
    served: Collection[nn.Module] = (),
    *,
    finds_repeatable: bool = True,
    is_grad_enabled: bool = True,
    is_cut: bool = True,
    known: Iterable[Layers] = (),
) -> Layers:
    """Trace `module` in its present mode and cut it into layers; if `known`, return these.

    `served`: modules that run differently on chunks. `finds_repeatable`: look for values that later
    stages can recompute; not in a batch of graphs, whose row counts vary. `is_cut`: the graph may
    be cut into chunks. If not, a module with weights of single nodes runs on the whole graph.
    """
    has_graphs = inputs.graphs is not None
    of_size = remedy_for_size(module, inputs)

    def on_sample(run: Callable[[Sample], Result]) -> tuple[Result, Sample]:
        sample = draw_sample(module, call, inputs)
        try:
            return run(sample), sample
        except UnsupportedError:
            if is_cut or has_graphs:
                raise
            sample = whole_sample(call, inputs)
            return run(sample), sample

    def learn(unfinished: fx.Graph, root: nn.Module) -> dict[str, Answer]:
        """Answer what forward asks of shapes, from two samples of different sizes."""
        named = zip(call.names, call.leaves, strict=True)
        pairs = {leaf.size(-1) for name, leaf in named if is_of_pairs(name) and leaf.dim()}

        def run(sample: Sample) -> dict[str, Answer]:
            other = draw_sample(module, call, inputs, SAMPLE_EDGES // 2)
            samples = (sample,) if sample.is_whole else (other, sample)
            num_rows = None if has_graphs else inputs.num_rows
            return learn_facts(unfinished, root, samples, num_rows, pairs, of_size)

        return on_sample(run)[0]

    questions = Questions(learn)
    graph = trace(module, call, questions, is_grad_enabled=is_grad_enabled)
    text = str(graph)
    for layers in known:
        if layers.trace == text:
            return layers

    def learn_and_cut(sample: Sample) -> Layers:
        edges = [f"leaf_{i}" for i, kind in enumerate(inputs.kinds) if kind is Kind.EDGE_INDEX]
        turn_leaves(graph, [] if has_graphs else edges)
        values = learn_values(graph, module, sample, of_size)
        if has_graphs:
            return cut_layers(graph, module, values, ROW_KINDS)
        if _unpack(graph):
            values = learn_values(graph, module, sample, of_size)
        _return_leaves(graph)
        if _take_loops_apart(graph, module, sample):
            values = learn_values(graph, module, sample, of_size)
        if _put_rows_first(graph, values, inputs, sample):
            values = learn_values(graph, module, sample, of_size)
        remedy = remedy_for_weights(module, inputs)
        return cut_layers(graph, module, values, remedy=remedy, edges=edges if is_cut else None)

    layers, sample = on_sample(learn_and_cut)
    layers = replace(
        layers,
        trace=text,
        weights={f"leaf_{slot}": name for slot, name in call.weights.items()},
        whole=fx.GraphModule(root_of(module), graph) if call.held else None,
    )
    if has_graphs or not finds_repeatable or sample.is_whole:
        return layers
    return find_repeatable(layers, module, call, inputs, served)


def _unpack(graph: fx.Graph) -> bool:
    """Replace tuples of tensors, such as the state of an LSTM, by their parts; return whether any.

    state = lstm(x, state)[1]    ->    h, c = lstm(x, (h, c))[1]
    """
    has_changed = False
    for node in list(graph.nodes):
        users = [one for one in node.users if one.target is not operator.getitem]
        if PARTS not in node.meta or not users:
            continue
        parts = _take_apart(graph, node, node.meta[PARTS])
        for user in users:

            def whole(one: fx.Node, node: fx.Node = node, parts: Any = parts) -> Any:
                return parts if one is node else one

            user.args = fx.node.map_arg(user.args, whole)
            user.kwargs = cast(Any, fx.node.map_arg(user.kwargs, whole))
        has_changed = True
    return has_changed


def _take_apart(graph: fx.Graph, node: fx.Node, parts: Any) -> Any:
    """Return nodes for the `parts` of the tuple `node`, in its structure."""
    if not parts:
        return node
    with graph.inserting_before(node.next):
        items = [graph.call_function(operator.getitem, (node, i)) for i in range(len(parts))]
    return tuple(_take_apart(graph, *one) for one in zip(items, parts, strict=True))


def _return_leaves(graph: fx.Graph) -> None:
    """Let the output hold arguments themselves where layers return them, such as edges."""
    leaves = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        if LEAF in node.meta:
            output.replace_input_with(node, leaves[node.meta[LEAF]])


def _take_loops_apart(graph: fx.Graph, module: nn.Module, sample: Sample) -> bool:
    """Divide attention weights into weights of edges and of loops that the layer adds.

    The parts have rows, so that they cross cuts and are outputs. Returns whether there are any.
    """
    root, num_rows = root_of(module), _num_plain(sample.edge_index) + sample.num_nodes
    has_changed = False
    for node in list(graph.nodes):
        edges = node.kwargs.get("edge_index", node.args[1] if len(node.args) > 1 else None)
        is_asked = node.op == "call_module" and "return_attention_weights" in node.kwargs
        if not is_asked or not isinstance(edges, fx.Node) or edges.op != "placeholder":
            continue
        if getattr(root.get_submodule(str(node.target)), "add_self_loops", False) is not True:
            continue
        pairs = [user for user in node.users if user.args[1:] == (1,)]
        for part in [one for pair in pairs for one in pair.users]:
            sizes, users = part.meta.get(SIZES, ()), list(part.users)
            if num_rows not in sizes or any(one.target is _of_edges for one in users):
                continue
            with graph.inserting_before(part.next):
                if sizes[0] == num_rows:
                    of_edges = graph.call_function(_of_edges, (part, edges))
                    of_loops = graph.call_function(_of_loops, (part, edges))
                    both = graph.call_function(_of_both, (of_edges, of_loops, edges))
                else:
                    out = graph.call_function(operator.getitem, (node, 0))
                    both = graph.call_function(_with_loops, (edges, out))
            both.meta[FREE] = True
            for user in users:
                user.replace_input_with(part, both)
            has_changed = True
    return has_changed


def _num_plain(edges: Tensor) -> int:
    """Return the number of edges that are no loops."""
    return int((edges[0] != edges[1]).sum())


def _of_edges(weights: Tensor, edges: Tensor) -> Tensor:
    """Return the weights of edges, `[num_edges, *]`, with zeros for loops, which have new ones."""
    rows = weights.new_zeros((edges.size(1), *weights.shape[1:]))
    return rows.index_put((edges[0] != edges[1],), weights[: _num_plain(edges)])


def _of_loops(weights: Tensor, edges: Tensor) -> Tensor:
    """Return the weights of the loop of each node, `[num_nodes, *]`."""
    return weights[_num_plain(edges) :]


def _of_both(of_edges: Tensor, of_loops: Tensor, edges: Tensor) -> Tensor:
    """Return the weights in the order of `_with_loops`."""
    return torch.cat([of_edges[edges[0] != edges[1]], of_loops])


def _with_loops(edges: Tensor, rows: Tensor) -> Tensor:
    """Return the edges that are no loops, then a loop for each of `rows`."""
    loops = torch.arange(rows.size(0), dtype=edges.dtype, device=edges.device)
    return torch.cat([edges[:, edges[0] != edges[1]], loops.expand(2, -1)], dim=1)


def _put_rows_first(
    graph: fx.Graph, values: dict[str, Value], inputs: Inputs, sample: Sample
) -> bool:
    """Let values cross cuts whose nodes are in another dimension; return whether `graph` changed.

    zeros(1, h.size(0), 8)   ->   zeros(1, x.size(0), 8), x a leaf
    h: [1, num_nodes, 8]     ->   rows = h.movedim(1, 0); h = rows.movedim(0, 1)
    """
    leaves = [n for n in graph.nodes if n.op == "placeholder" and n.name in values]
    of_nodes = [n for n, kind in zip(leaves, inputs.kinds, strict=True) if kind is Kind.NODE]
    leaf = next((one for one in of_nodes if one.users), None)
    known = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    has_changed = False
    for node in known:
        if FREE in node.meta or any(FREE in user.meta for one in node.users for user in one.users):
            continue  # done before
        value, source = values.get(node.name), size_asked(node)
        asked = None if source is None else values.get(source.name)
        if leaf is not None and asked is not None and source not in leaves:
            is_fixed = not any(size in sample.row_kinds for size in asked.row_shape)
            if asked.kind is Kind.NODE and is_fixed:
                _ask_leaf(graph, node, leaf, asked.row_shape)
                has_changed = True
        elif value is not None and value.nodes_in is not None and node.op != "get_attr":
            with graph.inserting_after(node):
                rows = graph.call_method("movedim", (node, value.nodes_in, 0))
            with graph.inserting_after(rows):
                back = graph.call_method("movedim", (rows, 0, value.nodes_in))
            back.meta[FREE] = True
            for user in [one for one in node.users if one is not rows]:
                user.replace_input_with(node, back)
            has_changed = True
    return has_changed


def _ask_leaf(graph: fx.Graph, node: fx.Node, leaf: fx.Node, row_shape: tuple[int, ...]) -> None:
    """Take the sizes that `node` asks for from `leaf`, which every stage has."""
    dim = dim_asked(node)
    with graph.inserting_before(node):
        new = graph.call_function(shape_like, (leaf, row_shape))
        mark(new)
        if dim is not None:
            new = graph.call_function(operator.getitem, (new, dim))
            mark(new)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
