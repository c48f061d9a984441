"""From the user's module and its arguments to layers."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lightning_gnnpipe.stages.call import Call
from lightning_gnnpipe.stages.kinds import Inputs
from lightning_gnnpipe.stages.layers import Layers, cut_layers
from lightning_gnnpipe.stages.repeat import find_repeatable
from lightning_gnnpipe.stages.trace import trace
from lightning_gnnpipe.stages.values import draw_sample, learn_values


def cut_module(
    module: nn.Module,
    call: Call,
    inputs: Inputs,
    served: Collection[nn.Module] = (),
    *,
    finds_repeatable: bool = True,
) -> Layers:
    """Trace `module` in its present mode and cut it into layers.

    Args:
        module: The pipelined module, all of its parameters on this rank.
        call: Its arguments.
        inputs: What they are.
        served: Modules that do not run as they are on chunks.
        finds_repeatable: Whether to look for values that stages can compute again.

    Raises:
        UnsupportedError: If it cannot be traced or cut.
    """
    graph = trace(module, call)
    values = learn_values(graph, module, draw_sample(module, call, inputs))
    layers = cut_layers(graph, module, values)
    if not finds_repeatable:
        return layers
    return find_repeatable(layers, module, call, inputs, served)
