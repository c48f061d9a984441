"""Weights that are carried forward to the step in which their gradients will be used.

    last weights w_(e-1), weights w_e  ->  step e is computed with w_e + d (w_e - w_(e-1))

Whoever looks at the module before, between and after forward and backward sees w_e.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import mean

import torch
from torch import Tensor, nn

from lightning_gnnpipe.engine.blocks import block_cuts
from lightning_gnnpipe.stages import Layers, find_users, split_layers


def late_steps(layers: Layers, num_blocks: int, module: nn.Module) -> dict[str, float]:
    """Return how many steps late the gradients of parameters are taken to be, where they are.

    Args:
        layers: The layers.
        num_blocks: In which they go back; 0 where chunks do: then all count as one step late.
        module: The module that they are of.
    """
    if not num_blocks:
        return {name: 1.0 for name, _ in module.named_parameters()}
    cuts = block_cuts(len(layers.segments), num_blocks)
    users = find_users(split_layers(layers, (1,) * len(layers.segments)), module)
    late = {
        name: mean(len(cuts) - bisect_right(cuts, layer) for layer in users[name])
        for name, _ in module.named_parameters()
        if name in users
    }
    return {name: steps for name, steps in late.items() if steps}


class PredictedWeights:
    """The weights that one step is computed with.

    Args:
        module: The pipelined module.
        distances: How many steps the parameters are carried forward, by name. Of those that are
            frozen, or on other ranks, none is.
        last: The weights of the step before, by name; are replaced by those of this step.
    """

    def __init__(
        self, module: nn.Module, distances: Mapping[str, float], last: dict[str, Tensor]
    ) -> None:
        self._ahead: list[tuple[nn.Parameter, Tensor]] = []
        now: dict[str, Tensor] = {}
        for name, distance in distances.items():
            parameter = module.get_parameter(name)
            if not parameter.requires_grad or parameter.numel() == 0:
                continue
            now[name] = parameter.detach().clone()
            before = last.get(name)
            if before is not None and before.shape == parameter.shape:
                self._ahead.append((parameter, torch.lerp(before, now[name], 1 + distance)))
        last.clear()
        last.update(now)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute with them within the block; those of the module are not written to."""
        own = [parameter.data for parameter, _ in self._ahead]
        for parameter, ahead in self._ahead:
            parameter.data = ahead
        torch.clear_autocast_cache()  # knows parameters, but not their data
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._ahead, own, strict=True):
                parameter.data = data
            torch.clear_autocast_cache()
