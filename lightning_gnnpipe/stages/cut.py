"""Traces the user's module and cuts it into layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.layers import ROW_KINDS, Layers, cut_layers
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
    """Trace `module`, all of its parameters on this rank, in its present mode; cut it into layers.

    `served`: modules that run differently on chunks. `finds_repeatable`: look for values that later
    stages can recompute; not in a batch of graphs, whose row counts vary. `is_cut`: the graph may
    be cut into chunks. If not, a module with weights of single nodes runs on the whole graph.
    """
    graph, reads = trace(module, call, is_grad_enabled=is_grad_enabled)
    has_graphs = inputs.graphs is not None

    def learn_and_cut(sample: Sample) -> Layers:
        values = learn_values(graph, module, sample, remedy_for_size(module, call, inputs))
        kinds, remedy = (ROW_KINDS, "") if has_graphs else ((Kind.NODE,), of_weights)
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
