"""What data a tensor was computed from, read off its autograd graph.

The output of a trained encoder changes in each step, because its weights do. Its data may still be
the same. Autograd saves most of the data that a function was given:

    x = lin(features)                          features
    x = dropout(lin(features))                 features, the mask
    x = emb(ids) + label_emb(known labels)     ids, known labels
    x = cat([emb.weight, features])            features, which are a part of x
    x = emb.weight + noise                     nothing: the noise is hidden
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_gnnpipe._compat_torch import saved_data, saved_options, shape_of_output

_MOST_NODES = 5000
_SAVES_ALL = ("MulBackward", "DivBackward", "MmBackward", "BmmBackward")
"""Functions that save each operand without a gradient."""


@dataclass(slots=True)
class Sources:
    """The data behind a tensor.

    Attributes:
        functions: Names and options of the functions that have computed it.
        weights: The leaves with a gradient.
        tensors: Tensors that autograd has saved and that need no gradient.
        is_hidden: Whether some data was not saved.
    """

    functions: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    is_hidden: bool = False


def find_sources(tensor: Tensor) -> Sources:
    """Return the data that `tensor`, which needs a gradient, was computed from."""
    found = Sources()
    if tensor.grad_fn is None:
        found.weights.append(tensor)
        return found
    nodes, seen = [tensor.grad_fn], {tensor.grad_fn}
    part = _hidden_part(tensor)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.weights.append(node.variable)
            continue
        own = saved_data(node)
        if node is tensor.grad_fn and part is not None:
            own.append(part)
        elif any(following is None for following, _ in node.next_functions):
            found.is_hidden |= not _is_all_saved(node, own)
        found.tensors += own
        found.functions.append(f"{node.name()} {saved_options(node)}")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
        if len(seen) > _MOST_NODES:
            found.is_hidden = True
            break
    return found


def _is_all_saved(node: Any, saved: list[Tensor]) -> bool:
    """Whether all operands of a function without a gradient are among what it has saved."""
    name = node.name()
    if name.startswith("AddmmBackward"):  # bias, and two factors
        return node.next_functions[0][0] is not None and bool(saved)
    if "Norm" in name:  # one without weights has nothing in their place
        return True
    return name.startswith(_SAVES_ALL) and bool(saved)


def _hidden_part(tensor: Tensor) -> Tensor | None:
    """Return the operand without a gradient of the `cat` that has made `tensor`, if it has one."""
    node: Any = tensor.grad_fn
    operands = node.next_functions
    if not node.name().startswith("CatBackward") or sum(f is None for f, _ in operands) != 1:
        return None
    dim = saved_options(node).get("dim", 0) % tensor.dim()
    sizes = [None if f is None else shape_of_output(f, index)[dim] for f, index in operands]
    start = sum(size or 0 for size in sizes[: sizes.index(None)])
    length = tensor.size(dim) - sum(size or 0 for size in sizes)
    return tensor.detach().narrow(dim, start, length)
