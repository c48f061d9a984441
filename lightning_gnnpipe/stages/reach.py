"""What gradients of some outputs reach: plainly, everything else has none.

Stages send each other gradients of a fixed form, zeros where there are none. An optimizer treats a
weight with a gradient of zeros otherwise than one without (momentum, weight decay), so where there
is none has to be known.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from lightning_gnnpipe.stages.layers import Layers
from lightning_gnnpipe.stages.split import first_names, names_used


def find_reached(layers: Layers, module: nn.Module, outputs: Collection[str]) -> set[str]:
    """Return the names of leaves and of `module`'s parameters that outputs are differentiable in.

    Args:
        layers: The layers of `module`.
        module: The pipelined module.
        outputs: Names of those of the layers' outputs that have gradients.
    """
    by_name = first_names(module)
    reached = set(outputs)
    for segment in reversed(layers.segments):
        wanted = {node for name, node in segment.ends.items() if name in reached}
        for node in reversed(segment.module.graph.nodes):
            if node not in wanted or not _has_gradient(node, layers):
                continue
            wanted.update(node.all_input_nodes)
            if node.op == "placeholder":
                reached.add(str(node.target))
            reached.update(by_name[name] for name in names_used(node, module, by_name))
    return reached


def _has_gradient(node: fx.Node, layers: Layers) -> bool:
    """Whether gradients flow through `node`, as far as is known."""
    name = str(node.target) if node.op == "placeholder" else node.name
    value = layers.values.get(name)
    return value is None or value.requires_grad
