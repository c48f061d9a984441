"""Weights that are carried forward to the step in which their gradients will be used.

    s_e = w_e - w_(e-1)         how far the last step went
    r = <s_e, s_(e-1)> / max(|s_e|^2, |s_(e-1)|^2), at least 0
                                how far it goes on from the one before it
    (r + r^2 + ... + r^d) s_e   the next d steps, if each goes on as far from its own
    w_e + (r + ... + r^d) s_e   what step e is computed with

Of each parameter by itself. Whoever looks at the module before, between and after forward and
backward sees w_e; hooks that run in them see what the step is computed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.history import LastWeights


def forecast(steps: Sequence[Tensor], before: Sequence[Tensor], num_steps: int) -> Tensor:
    """Return how many times each step will be gone again in the next `num_steps`.

    Args:
        steps: The last step of each parameter, any shapes.
        before: The one before it.
        num_steps: How many are foreseen.

    Returns:
        From 0, where a step does not go on from the one before it, to `num_steps`; one a parameter.
    """
    products, squares = [], []
    for step, last in zip(steps, before, strict=True):
        wide = torch.promote_types(step.dtype, torch.float32)
        this, that = step.to(wide), last.to(wide)
        products.append((this * that.conj()).real.sum())
        norms = torch.linalg.vector_norm(this), torch.linalg.vector_norm(that)
        squares.append(torch.maximum(*norms).square())
    largest = torch.stack(squares)
    share = torch.stack(products) / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    share = share.nan_to_num(0.0).clamp(0, 1)  # of squares that overflow nothing is known
    total = torch.zeros_like(share)
    for _ in range(num_steps):
        total = share * (1 + total)
    return total


class PredictedWeights:
    """The weights that one step is computed with.

    Args:
        module: The pipelined module. Parameters that are frozen or on other ranks stay as they are.
        lookahead: How many steps are foreseen.
        last: The weights of the step before; are replaced by those of this one.
    """

    def __init__(self, module: nn.Module, lookahead: int, last: LastWeights) -> None:
        self._last = last
        self._watched = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.numel()
        }
        now = {
            name: parameter.detach().clone()
            for name, parameter in self._watched.items()
            if name not in last.written
        }
        steps = {
            name: _finite(value - last.values[name].to(value.device))
            for name, value in now.items()
            if name in last.values and last.values[name].shape == value.shape
        }
        known = [name for name in steps if name in last.steps]
        self._ahead: list[tuple[nn.Parameter, Tensor]] = []
        if known:
            before = [last.steps[name].to(steps[name].device) for name in known]
            distances = forecast([steps[name] for name in known], before, lookahead)
            for name, distance in zip(known, distances.unbind(), strict=True):
                ahead = now[name] + (distance * steps[name]).to(now[name].dtype)
                self._ahead.append((module.get_parameter(name), ahead))
        last.values, last.steps = now, steps

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute with them within the block; the module then has its own again.

        Parameters that it has written to meanwhile, as `nn.Embedding(max_norm=...)` does, are left
        as they are in all later steps.
        """
        own = [parameter.data for parameter, _ in self._ahead]
        versions = {name: version_of(parameter) for name, parameter in self._watched.items()}
        try:
            for parameter, ahead in self._ahead:
                parameter.data = ahead
            torch.clear_autocast_cache()  # knows parameters, but not their data
            yield
        finally:
            for (parameter, _), data in zip(self._ahead, own, strict=True):
                parameter.data = data
            torch.clear_autocast_cache()
            self._last.exclude(
                name for name, one in self._watched.items() if version_of(one) != versions[name]
            )


def _finite(step: Tensor) -> Tensor:
    """Leave entries as they are that are infinite, in place."""
    return step.masked_fill_(~step.isfinite(), 0)
