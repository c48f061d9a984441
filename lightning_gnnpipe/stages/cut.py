"""Traces the user's module and cuts it into layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.layers import FREE, ROW_KINDS, Layers, cut_layers
from lightning_gnnpipe.stages.mixing import turn_leaves
from lightning_gnnpipe.stages.repeat import find_repeatable
from lightning_gnnpipe.stages.shapes import dim_asked, shape_like, size_asked
from lightning_gnnpipe.stages.trace import strip_root, trace
from lightning_gnnpipe.stages.values import (
    LEAF,
    PARTS,
    SampleRun,
    draw_samples,
    remedy_for_size,
    remedy_for_weights,
    whole_sample,
)


def cut_module(
    module: nn.Module,
    call: Call,
    inputs: Inputs,
    served: Collection[nn.Module] = (),
    *,
    finds_repeatable: bool = True,
    is_grad_enabled: bool = True,
    is_cut: bool = True,
    is_shared: bool = False,
    known: Iterable[Layers] = (),
) -> Layers:
    """Trace `module` in its present mode and cut it into layers; if `known`, return these.

    `served`: modules that run differently on chunks. `finds_repeatable`: look for values that later
    stages can recompute; not in a batch of graphs, whose row counts vary. `is_cut`: the graph may
    be cut into chunks. If not, a module with weights of single nodes runs on the whole graph.
    `is_shared`: see `SampleRun`.
    """
    has_graphs = inputs.graphs is not None
    remedy, repeats = remedy_for_size(module, inputs), finds_repeatable and not has_graphs

    def trace_and_cut(run: SampleRun) -> Layers:
        graph = trace(module, call, run, is_grad_enabled=is_grad_enabled)
        text = str(graph)
        for layers in known:
            if layers.trace == text:
                return layers
        layers = replace(
            _cut(graph, module, inputs, run, is_cut),
            trace=text,
            written=frozenset(map(strip_root, run.written)),
            is_of_whole=run.sample.is_whole,
            weights={f"leaf_{slot}": name for slot, name in call.weights.items()},
        )
        if repeats and not run.sample.is_whole:
            return find_repeatable(layers, run, served)
        return layers

    run = SampleRun(draw_samples(module, call, inputs), call, remedy, is_shared=is_shared)
    try:
        return trace_and_cut(run)
    except UnsupportedError:
        if is_cut or has_graphs or not run.has_failed:
            raise
    whole = (whole_sample(call, inputs),)
    return trace_and_cut(SampleRun(whole, call, remedy, is_shared=is_shared))


def _cut(
    graph: fx.Graph, module: nn.Module, inputs: Inputs, run: SampleRun, is_cut: bool
) -> Layers:
    if inputs.graphs is not None:
        return cut_layers(graph, module, run.values, ROW_KINDS, draws=run.draws)
    edges = [f"leaf_{i}" for i, kind in enumerate(inputs.kinds) if kind is Kind.EDGE_INDEX]
    turn_leaves(graph, edges)
    _unpack(graph, run)
    _return_leaves(graph)
    _put_rows_first(graph, inputs, run)
    remedy = remedy_for_weights(module, inputs)
    return cut_layers(
        graph,
        module,
        run.values,
        remedy=remedy,
        edges=edges if is_cut else None,
        draws=run.draws,
        edge_counts=run.sample.edge_sizes,
    )


def _unpack(graph: fx.Graph, run: SampleRun) -> None:
    """Replace tuples of tensors, such as the state of an LSTM, by their parts.

    state = lstm(x, state)[1]    ->    h, c = lstm(x, (h, c))[1]
    """
    for node in list(graph.nodes):
        users = [one for one in node.users if one.target is not operator.getitem]
        if PARTS not in node.meta or not users:
            continue
        parts = _take_apart(graph, node, node.meta[PARTS], run)
        for user in users:

            def whole(one: fx.Node, node: fx.Node = node, parts: Any = parts) -> Any:
                return parts if one is node else one

            user.args = fx.node.map_arg(user.args, whole)
            user.kwargs = cast(Any, fx.node.map_arg(user.kwargs, whole))


def _take_apart(graph: fx.Graph, node: fx.Node, parts: Any, run: SampleRun) -> Any:
    """Return nodes for the `parts` of the tuple `node`, in its structure."""
    if not parts:
        return node
    with graph.inserting_before(node.next):
        items = [_call(graph, run, operator.getitem, node, i) for i in range(len(parts))]
    return tuple(_take_apart(graph, *one, run) for one in zip(items, parts, strict=True))


def _call(graph: fx.Graph, run: SampleRun, function: Callable[..., Any], *args: Any) -> fx.Node:
    """Return a new node, which has run on the samples."""
    node = graph.call_function(function, args)
    run.run(node)
    return node


def _return_leaves(graph: fx.Graph) -> None:
    """Let the output hold arguments themselves where layers return them, such as edges."""
    leaves = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        if LEAF in node.meta:
            output.replace_input_with(node, leaves[node.meta[LEAF]])


def _put_rows_first(graph: fx.Graph, inputs: Inputs, run: SampleRun) -> None:
    """Let values cross cuts whose nodes are in another dimension.

    zeros(1, h.size(0), 8)   ->   zeros(1, x.size(0), 8), x a leaf
    h: [1, num_nodes, 8]     ->   rows = h.movedim(1, 0); h = rows.movedim(0, 1)
    """
    values = run.values
    leaves = [n for n in graph.nodes if n.op == "placeholder" and n.name in values]
    of_nodes = [n for n, kind in zip(leaves, inputs.kinds, strict=True) if kind is Kind.NODE]
    leaf = next((one for one in of_nodes if one.users), None)
    known = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in known:
        if FREE in node.meta or any(FREE in user.meta for one in node.users for user in one.users):
            continue  # done before
        value, source = values.get(node.name), size_asked(node)
        asked = None if source is None else values.get(source.name)
        if leaf is not None and asked is not None and source not in leaves:
            is_fixed = not any(size in run.sample.row_kinds for size in asked.row_shape)
            if asked.kind is Kind.NODE and is_fixed:
                _ask_leaf(graph, node, leaf, asked.row_shape, run)
        elif value is not None and value.nodes_in is not None and node.op != "get_attr":
            with graph.inserting_before(node.next):
                rows = _call(graph, run, torch.movedim, node, value.nodes_in, 0)
                back = _call(graph, run, torch.movedim, rows, 0, value.nodes_in)
            back.meta[FREE] = True
            for user in [one for one in node.users if one is not rows]:
                user.replace_input_with(node, back)


def _ask_leaf(
    graph: fx.Graph, node: fx.Node, leaf: fx.Node, row_shape: tuple[int, ...], run: SampleRun
) -> None:
    """Take the sizes that `node` asks for from `leaf`, which every stage has."""
    dim = dim_asked(node)
    with graph.inserting_before(node):
        new = _call(graph, run, shape_like, leaf, row_shape)
        if dim is not None:
            new = _call(graph, run, operator.getitem, new, dim)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
