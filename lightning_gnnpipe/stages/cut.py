"""From the user's module and its arguments to layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.layers import Layers, cut_layers
from lightning_gnnpipe.stages.repeat import find_repeatable
from lightning_gnnpipe.stages.trace import trace
from lightning_gnnpipe.stages.values import (
    Sample,
    draw_sample,
    learn_values,
    remedy_for_size,
    remedy_for_weights,
    sized_weights,
    whole_sample,
)

_OF_GRAPHS = (
    Kind.NODE,
    Kind.EDGE,
    Kind.GRAPH,
    Kind.NONEMPTY_PREFIX,
)  # rows of outputs


def cut_module(
    module: nn.Module,
    call: Call,
    inputs: Inputs,
    served: Collection[nn.Module] = (),
    *,
    finds_repeatable: bool = True,
    is_grad_enabled: bool = True,
    is_cut: bool = True,
) -> Layers:
    """Trace `module` in its present mode and cut it into layers.

    Args:
        module: The pipelined module, all of its parameters on this rank.
        call: Its arguments.
        inputs: What they are.
        served: Modules that do not run as they are on chunks.
        finds_repeatable: Whether to look for values that stages can compute again. Those of a
            batch of graphs are not: how many rows they spare is another number for each batch.
        is_grad_enabled: See `trace`.
        is_cut: Whether the graph is, or may be, cut into chunks. If not, a module with weights of
            single nodes, which does not run on a small part of the graph, is run on all of it.

    Raises:
        UnsupportedError: If it cannot be traced or cut.
    """
    graph, reads = trace(module, call, is_grad_enabled=is_grad_enabled)
    has_graphs = inputs.graphs is not None

    def learn_and_cut(sample: Sample) -> Layers:
        values = learn_values(graph, module, sample, remedy_for_size(module, call, inputs))
        kinds, remedy = (_OF_GRAPHS, "") if has_graphs else ((Kind.NODE,), of_weights)
        layers = cut_layers(graph, module, values, kinds, remedy)
        return replace(layers, outside=reads)

    of_weights = "" if has_graphs else remedy_for_weights(module, inputs)
    try:
        layers = learn_and_cut(draw_sample(module, call, inputs))
    except UnsupportedError:
        if is_cut or has_graphs or sized_weights(module, inputs)[1]:
            raise
        return learn_and_cut(whole_sample(call, inputs))
    if has_graphs or not finds_repeatable:
        return layers
    return find_repeatable(layers, module, call, inputs, served)
