"""What waits of gradients between two steps: those of readers' halos, or of linear outputs.

In: the gradients that chunks have, in backward. Out: what their rows are given, in this step for
rows that were read fresh, in the next for stale ones, by the factors of `DelayedGradients`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gnnpipe.history.gradients import GradientBuffer, Where, sized
from lightning_gnnpipe.history.saved import SavedGradients

if TYPE_CHECKING:
    from lightning_gnnpipe.history.delayed import DelayedGradients
    from lightning_gnnpipe.types import ChunkView


class WaitingBuffer(GradientBuffer):
    """What waits for the next step: the last gradients of readers' halos, or of outputs, damped.

    All of it is divided by `scale`, which is on all that is taken.
    """

    def __init__(self, rule: DelayedGradients) -> None:
        super().__init__(rule.scale)
        self._rule = rule  # at the largest learning rate
        self._decay = rule.decay / rule.scale
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}  # by reader: positions, what is late
        self._came: set[int] = set()  # readers, within a step
        self._total: Tensor | None = None  # of all readers, within a step
        self._has_total = False
        # What is late of outputs, None for nothing. A chunk that comes replaces it by its
        # gradients, which are damped at the end of the step.
        self._outputs: Tensor | None = None
        self._is_open = False  # whether one has come in this step

    def follow_rate(self, share: float) -> None:
        rule = self._rule.at_rate(share)
        if rule.scale != self.scale:  # what waits is given as it is
            self._multiply(self.scale / rule.scale)
        self.scale, self._decay = rule.scale, rule.decay / rule.scale

    def add(self, chunk: ChunkView, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        own = grad.to(like.device)
        total = self._sum_halos(own.dtype, like)
        total.index_add_(0, positions, own.to(total.dtype))
        if chunk.index in self._halos:
            where, late = self._halos[chunk.index]
            total.index_add_(0, where, late.to(total.dtype), alpha=-1)
        self._halos[chunk.index] = positions, own * self._decay
        self._came.add(chunk.index)

    def _take(self, rows: Where, like: Tensor) -> Tensor | None:
        if not self._halos and not self._has_total:
            return None
        known = next((late.dtype for _, late in self._halos.values()), torch.float32)
        return self._sum_halos(known, like)[rows]

    def _sum_halos(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return the sum of what readers have, `[num_rows, *]`: what is late until they come."""
        if self._has_total:
            assert self._total is not None
            return self._total
        wide = torch.promote_types(dtype, torch.float32)  # differences of halves are too coarse
        self._total = sized(self._total, wide, like).zero_()
        for positions, late in self._halos.values():
            self._total.index_add_(0, positions, late.to(wide))
        self._has_total = True
        return self._total

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, None]:
        self._is_open = True
        self._outputs = sized(self._outputs, dtype, like)
        self._outputs[chunk.start : chunk.end] = grad
        return self._outputs, None

    def end_step(self, *, is_exact: bool) -> None:
        if is_exact:
            self._drop()
        else:  # of a layer that has no gradients for now nothing waits
            self._halos = {one: self._halos[one] for one in self._halos if one in self._came}
            if not self._is_open:
                self._outputs = None
            elif self._outputs is not None and self._decay != 1.0:
                self._outputs.mul_(self._decay)
        self._has_total = self._is_open = False
        self._came.clear()

    def _drop(self) -> None:
        """Forget what waits."""
        self._halos.clear()
        self._outputs = None

    def _multiply(self, factor: float) -> None:
        """Multiply what waits."""
        for _, late in self._halos.values():
            late.mul_(factor)
        if self._outputs is not None:
            self._outputs.mul_(factor)

    def rescale(self, factor: float | None) -> None:
        if factor is None:
            self._drop()
        else:
            self._multiply(factor)

    def save(self) -> SavedGradients | None:
        if self._outputs is None and not self._halos:
            return None
        return SavedGradients(self._outputs, dict(self._halos), self.scale)

    def load(self, saved: SavedGradients) -> None:
        self._halos = {chunk: (where, late.clone()) for chunk, (where, late) in saved.halos.items()}
        self._outputs = None if saved.outputs is None else saved.outputs.clone()
        self._multiply((self._rule.decay > 0) * saved.scale / self.scale)
