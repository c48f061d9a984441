"""Whether rows that a pass without gradients computes may take the place of histories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.stages import Call


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """What a training pass was given: rows of a pass that is given something else are others.

    Attributes:
        leaves: The tensors; None for what needs a gradient, which other weights may have made.
        versions: How often each had been written to.
        frozen: Which weights needed a gradient.
    """

    leaves: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    frozen: tuple[bool, ...]

    @staticmethod
    def of(call: Call, module: nn.Module) -> TrainedCall:
        """Return what is kept of a call of `module`."""
        return TrainedCall(
            tuple(None if leaf.requires_grad else leaf for leaf in call.leaves),
            tuple(map(version_of, call.leaves)),
            tuple(p.requires_grad for p in module.parameters()),
        )

    def is_like(self, call: Call, module: nn.Module) -> bool:
        """Whether `call` is given the same, by value where it is in other tensors."""
        if self.frozen != tuple(p.requires_grad for p in module.parameters()):
            return False
        return len(self.leaves) == len(call.leaves) and all(
            known is not None and _is_same(known, version, leaf)
            for known, version, leaf in zip(self.leaves, self.versions, call.leaves, strict=True)
        )


def _is_same(known: Tensor, version: int, leaf: Tensor) -> bool:
    if known is leaf:
        return version_of(leaf) == version
    is_alike = (known.shape, known.dtype, known.device) == (leaf.shape, leaf.dtype, leaf.device)
    return version_of(known) == version and is_alike and torch.equal(known, leaf)
