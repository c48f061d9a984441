"""What data a tensor was computed from, read off its autograd graph.

An argument that was computed by trained weights, as an encoder's output, is another in each step
because the weights are. Whether its data are others as well, the tensors tell that autograd has
saved:

    x = lin(features)                          features
    x = dropout(lin(features))                 features, the mask
    x = emb(ids) + label_emb(known labels)     ids, known labels
    x = emb.weight + noise                     nothing: the noise is hidden
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lightning_gnnpipe._compat_torch import saved_data

_MOST_NODES = 5000


@dataclass(slots=True)
class Sources:
    """The data behind a tensor.

    Attributes:
        tensors: Those that autograd has saved and that need no gradient.
        is_hidden: Whether there are others that it has not saved.
    """

    tensors: list[Tensor] = field(default_factory=list)
    is_hidden: bool = False


def find_sources(tensor: Tensor) -> Sources:
    """Return the data that `tensor`, which needs a gradient, was computed from."""
    found = Sources()
    nodes = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        own = saved_data(node)
        found.tensors += own
        # A norm without weights has nothing in their place.
        has_blank = any(following is None for following, _ in node.next_functions)
        found.is_hidden |= has_blank and not own and "Norm" not in node.name()
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        nodes += following
        if len(seen) > _MOST_NODES:
            found.is_hidden = True
            break
    return found
