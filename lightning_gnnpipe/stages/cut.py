"""From the user's module and its arguments to layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from lightning_gnnpipe.stages.call import Call
from lightning_gnnpipe.stages.graph_batch import Kind
from lightning_gnnpipe.stages.kinds import Inputs
from lightning_gnnpipe.stages.layers import Layers, cut_layers
from lightning_gnnpipe.stages.repeat import find_repeatable
from lightning_gnnpipe.stages.trace import trace
from lightning_gnnpipe.stages.values import draw_sample, learn_values

_OF_GRAPHS = (Kind.NODE, Kind.EDGE, Kind.GRAPH, Kind.FILLED)  # what outputs may have rows of


def cut_module(
    module: nn.Module,
    call: Call,
    inputs: Inputs,
    served: Collection[nn.Module] = (),
    *,
    finds_repeatable: bool = True,
    is_grad_enabled: bool = True,
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

    Raises:
        UnsupportedError: If it cannot be traced or cut.
    """
    graph, reads = trace(module, call, is_grad_enabled=is_grad_enabled)
    values = learn_values(graph, module, draw_sample(module, call, inputs))
    has_graphs = inputs.graphs is not None
    kinds = _OF_GRAPHS if has_graphs else (Kind.NODE,)
    layers = replace(cut_layers(graph, module, values, kinds), outside=reads)
    if has_graphs or not finds_repeatable:
        return layers
    return find_repeatable(layers, module, call, inputs, served)
