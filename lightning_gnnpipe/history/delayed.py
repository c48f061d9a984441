"""Delayed gradients: what comes too late for a stale row in one step is used in the next.

    fresh reader (later in the order)     its gradient of this step
    stale reader (earlier in the order)   its gradient of the last step, damped

So every edge between chunks counts once a step, whatever the orders of the two steps are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history.gradients import GradientBuffer, GradientRule, Where, sized
from lightning_gnnpipe.history.saved import SavedGradients
from lightning_gnnpipe.types import ChunkView


@dataclass(frozen=True)
class DelayedGradients(GradientRule):
    """A stale row is given the gradient that its reader had for it in the step before.

    With a_e the gradient that a reader in another chunk has for a row in step e:

        v_e = momentum v_(e-1) + (1 - momentum) a_e        v_e = a_e in the first step
        dH += a_e                    if the reader comes later in the order of step e
        dH += decay v_(e-1)          if it comes earlier, and has read the row stale

    An exact step needs no such gradients and drops those that wait. They are kept for each chunk's
    halo; those of linear layers in the buffer of their outputs' gradients, which there is anyway.
    Statistics of norms stay constants.

    Source: the stale gradients of PipeGCN (arXiv 2203.10428) and their smoothing, between chunks
    instead of partitions; also the backward compensation of LMC (arXiv 2302.00924) with beta = 0,
    that is by historical values alone. A beta above 0 needs every layer computed on the halo too.

    Args:
        decay: Factor on what waited, from 0 to 1. What comes over m stale edges is m steps old, and
            damped by decay^m.
        momentum: Share of the old in what waits, from 0 to below 1 (PipeGCN: 0.95).

    Raises:
        ConfigError: If one of them is out of its range.
    """

    decay: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(
                explain(
                    expected="'decay' of DelayedGradients to be from 0 to 1",
                    found=str(self.decay),
                    remedy="1 leaves what waited as it is, 0 drops it.",
                )
            )
        if not 0 <= self.momentum < 1:
            raise ConfigError(
                explain(
                    expected="'momentum' of DelayedGradients to be from 0 to below 1",
                    found=str(self.momentum),
                    remedy="0 uses the gradient of the last step alone; PipeGCN's is 0.95.",
                )
            )

    @property
    def is_delayed(self) -> bool:
        return True

    def num_tables(self, *, recomputes: bool) -> int:
        return 1 + (self.momentum > 0) + recomputes

    def make_buffer(self) -> GradientBuffer:
        return _WaitingBuffer(self)


class _WaitingBuffer(GradientBuffer):
    """What waits for the next step: v of each reader's halo, or of a linear layer's outputs."""

    def __init__(self, rule: DelayedGradients) -> None:
        super().__init__()
        self._rule = rule
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}  # by reader: positions, v
        self._total: Tensor | None = None  # of all readers, within a step
        self._has_total = False
        self._outputs: Tensor | None = None  # v; within a step decay v, or this step's gradient
        self._waits = self._is_open = False  # whether there is a v; whether they are written to
        self._old: Tensor | None = None  # v within a step

    def add(self, chunk: ChunkView, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        own = grad.to(like.device)
        total = self._sum_halos(own.dtype, like)
        total.index_add_(0, positions, own.to(total.dtype))
        if chunk.index not in self._halos:
            self._halos[chunk.index] = positions, own.clone()
            return
        before, v = self._halos[chunk.index]
        total.index_add_(0, before, v.to(total.dtype), alpha=-self._rule.decay)
        v.lerp_(own.to(v.dtype), 1 - self._rule.momentum)

    def take(self, rows: Where, like: Tensor) -> Tensor | None:
        if not self._halos and not self._has_total:
            return None
        known = next((v.dtype for _, v in self._halos.values()), torch.float32)
        return self._sum_halos(known, like)[rows]

    def _sum_halos(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return the sum of what readers have, `[num_rows, *]`: decay v until they come."""
        if self._has_total:
            assert self._total is not None
            return self._total
        wide = torch.promote_types(dtype, torch.float32)  # differences of halves are too coarse
        self._total = sized(self._total, wide, like).zero_()
        for positions, v in self._halos.values():
            self._total.index_add_(0, positions, v.to(wide), alpha=self._rule.decay)
        self._has_total = True
        return self._total

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, None]:
        outputs = self._outputs = sized(self._outputs, dtype, like)
        if not self._is_open:
            self._is_open = True
            if self._rule.momentum and self._waits:
                self._old = sized(self._old, dtype, like).copy_(outputs)
            if self._rule.decay != 1.0:
                outputs.mul_(self._rule.decay)
        outputs[chunk.start : chunk.end] = grad
        return outputs, None

    def end_step(self, *, is_exact: bool) -> None:
        self._has_total = False
        if is_exact:
            self._halos.clear()
            if self._outputs is not None:
                self._outputs.zero_()
            self._waits = False
        elif self._is_open:
            assert self._outputs is not None
            if self._rule.momentum and self._waits:
                assert self._old is not None
                self._outputs.lerp_(self._old, self._rule.momentum)
            self._waits = True
        self._is_open = False

    def save(self) -> SavedGradients | None:
        outputs = self._outputs if self._waits else None
        return SavedGradients(outputs, self._halos) if self._waits or self._halos else None

    def load(self, saved: SavedGradients) -> None:
        self._halos = {chunk: (where, v.clone()) for chunk, (where, v) in saved.halos.items()}
        self._outputs = None if saved.outputs is None else saved.outputs.clone()
        self._waits = saved.outputs is not None
