"""Parameters of other stages as husks: the same `nn.Parameter` objects without data.

Names, order and optimizer ids stay those of the user's module on every rank; the memory is spent
only where a stage needs it. A husk keeps its number of dimensions, so that code which groups
parameters by `p.ndim` decides the same on all ranks. Buffers are kept everywhere: they are small,
and the owner's values count.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Shape = tuple[torch.Size, torch.dtype]


def make_husks(module: nn.Module, users: Mapping[str, set[int]], stage: int) -> dict[str, Shape]:
    """Empty the parameters of `module` that only other stages use; return their shapes by name."""
    shapes: dict[str, Shape] = {}
    for name, parameter in module.named_parameters():
        if stage in users.get(name, {stage}):
            continue
        parameter.grad = None
        if parameter.dim():  # a single number cannot be emptied
            shapes[name] = (parameter.shape, parameter.dtype)
            parameter.data = parameter.data.new_empty((0, *parameter.shape[1:]))
    return shapes


def fill_husks(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the husks of `module` their data back."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].data = tensor.to(parameters[name].device)
