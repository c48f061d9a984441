"""Delayed gradients: what comes too late for a stale row in one step is used in the next.

    fresh reader (later in the order)     its gradient of this step
    stale reader (earlier in the order)   its gradient of the last step, carried forward

So every edge between chunks counts in every step, whatever the orders of the two steps are.
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
        dH += scale a_e              if the reader comes later in the order of step e
        dH += decay (v_(e-1) + lead (v_(e-1) - v_(e-2)))   if it comes earlier, and has read the
                                                           row stale; v_(-1) = v_0

    What comes over m stale edges is m steps old. Where most edges are between chunks that is long
    enough for training to swing, as a control loop with a dead time does; `lead` is what stops
    it: it takes the phase back that a step of delay costs. So does, at the price of a bias for
    longer paths, less of what is late: with `scale` = 2 - `decay` every edge between chunks counts
    once on average over random orders.

    An exact step needs no such gradients and drops those that wait. They are kept for each chunk's
    halo; those of linear layers in the buffer of their outputs' gradients, which there is anyway.
    Smoothing and carrying forward take one more table. Statistics of norms stay constants.

    Source: the stale gradients of PipeGCN (arXiv 2203.10428) and their smoothing, between chunks
    instead of partitions; also the backward compensation of LMC (arXiv 2302.00924) with beta = 0,
    that is by historical values alone. A beta above 0 needs every layer computed on the halo too.
    `lead` is ours: linear extrapolation.

    Args:
        decay: Factor on what waited, from 0 to 1. What comes over m stale edges is damped by
            decay^m.
        momentum: Share of the old in what waits, from 0 to below 1 (PipeGCN: 0.95).
        scale: Factor on what is in time, above 0.
        lead: How far, in steps, what waited is carried forward; from 0 to 1 / (1 - momentum), which
            makes up for the whole delay, and amplifies noise: without momentum up to three times,
            which diverges where most edges are between chunks.

    Raises:
        ConfigError: If one of them is out of its range.
    """

    decay: float = 1.0
    momentum: float = 0.0
    scale: float = 1.0
    lead: float = 0.0

    def __post_init__(self) -> None:
        for name, is_right, bounds, remedy in (
            ("decay", 0 <= self.decay <= 1, "from 0 to 1", "1 leaves what waited as it is."),
            (
                "momentum",
                0 <= self.momentum < 1,
                "from 0 to below 1",
                "0 uses the gradient of the last step alone; PipeGCN's is 0.95.",
            ),
            ("scale", self.scale > 0, "above 0", "1 leaves what is in time as it is."),
            (
                "lead",
                0 <= self.lead * (1 - self.momentum) <= 1,
                "from 0 to 1 / (1 - momentum)",
                "0 carries nothing forward.",
            ),
        ):
            if not is_right:
                raise ConfigError(
                    explain(
                        expected=f"'{name}' of DelayedGradients to be {bounds}",
                        found=str(getattr(self, name)),
                        remedy=remedy,
                    )
                )

    @property
    def is_delayed(self) -> bool:
        return True

    @property
    def keeps_before(self) -> bool:
        """Whether a second v is kept."""
        return self.momentum > 0 or self.lead > 0

    def num_tables(self, *, recomputes: bool) -> int:
        return 1 + self.keeps_before + recomputes

    def make_buffer(self) -> GradientBuffer:
        return _WaitingBuffer(self)


@dataclass(slots=True)
class _Waiting:
    """What one reader has for its halo: its positions, v of the last step and of that before."""

    positions: Tensor
    now: Tensor
    before: Tensor | None = None


class _WaitingBuffer(GradientBuffer):
    """What waits for the next step: v of each reader's halo, or of a linear layer's outputs."""

    def __init__(self, rule: DelayedGradients) -> None:
        super().__init__()
        self._rule = rule
        self._decay = rule.decay / rule.scale  # all that is taken is scaled
        self._halos: dict[int, _Waiting] = {}  # by reader
        self._total: Tensor | None = None  # of all readers, within a step
        self._has_total = False
        # Between steps v and the one before it; within a step this step's gradient over what is
        # late, and v.
        self._outputs: Tensor | None = None
        self._before: Tensor | None = None
        self._waits = self._leads = self._is_open = False  # whether there is v, v before; written

    def add(self, chunk: ChunkView, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        own = grad.to(like.device)
        total = self._sum_halos(own.dtype, like)
        total.index_add_(0, positions, own.to(total.dtype))
        waiting = self._halos.get(chunk.index)
        if waiting is None:
            self._halos[chunk.index] = _Waiting(positions, own.clone())
            return
        total.index_add_(0, waiting.positions, self._late(waiting, total.dtype), alpha=-1)
        v = torch.lerp(waiting.now, own.to(waiting.now.dtype), 1 - self._rule.momentum)
        waiting.before = waiting.now if self._rule.lead else None
        waiting.now = v

    def take(self, rows: Where, like: Tensor) -> Tensor | None:
        if not self._halos and not self._has_total:
            return None
        known = next((one.now.dtype for one in self._halos.values()), torch.float32)
        return self._sum_halos(known, like)[rows]

    def _sum_halos(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return the sum of what readers have, `[num_rows, *]`: what is late until they come."""
        if self._has_total:
            assert self._total is not None
            return self._total
        wide = torch.promote_types(dtype, torch.float32)  # differences of halves are too coarse
        self._total = sized(self._total, wide, like).zero_()
        for waiting in self._halos.values():
            self._total.index_add_(0, waiting.positions, self._late(waiting, wide))
        self._has_total = True
        return self._total

    def _late(self, waiting: _Waiting, dtype: torch.dtype) -> Tensor:
        """Return what a reader's halo is given, `[num_halo, *]`, until it comes."""
        late = waiting.now.to(dtype, copy=True)
        if waiting.before is not None:
            late.lerp_(waiting.before.to(dtype), -self._rule.lead)
        return late.mul_(self._decay)

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, None]:
        if not self._is_open:
            self._is_open = True
            self._open(dtype, like)
        assert self._outputs is not None
        self._outputs[chunk.start : chunk.end] = grad
        return self._outputs, None

    def _open(self, dtype: torch.dtype, like: Tensor) -> None:
        """Put what is late in place of v, and v where the one before it was."""
        v, before = sized(self._outputs, dtype, like), self._before
        late = v
        if self._rule.keeps_before and self._waits:
            late = sized(before, dtype, like)
            if self._leads and late is before:
                late.lerp_(v, 1 + self._rule.lead)
            else:
                late.copy_(v)
            self._before = v
        self._outputs = late if self._decay == 1.0 else late.mul_(self._decay)

    def end_step(self, *, is_exact: bool) -> None:
        self._has_total = False
        if is_exact:
            self._halos.clear()
            if self._outputs is not None:
                self._outputs.zero_()
            self._waits = self._leads = False
        elif self._is_open:
            assert self._outputs is not None
            if self._rule.momentum and self._waits:
                assert self._before is not None
                self._outputs.lerp_(self._before, self._rule.momentum)
            self._leads = self._waits and self._rule.lead > 0
            self._waits = True
        self._is_open = False

    def save(self) -> SavedGradients | None:
        if not self._waits and not self._halos:
            return None
        return SavedGradients(
            self._outputs if self._waits else None,
            {chunk: (one.positions, one.now) for chunk, one in self._halos.items()},
            self._before if self._leads else None,
            {
                chunk: (one.positions, one.before)
                for chunk, one in self._halos.items()
                if one.before is not None
            },
        )

    def load(self, saved: SavedGradients) -> None:
        self._halos = {
            chunk: _Waiting(where, v.clone()) for chunk, (where, v) in saved.halos.items()
        }
        self._outputs = None if saved.outputs is None else saved.outputs.clone()
        self._waits = saved.outputs is not None
        if not self._rule.lead:
            return
        for chunk, (_, v) in saved.halos_before.items():
            self._halos[chunk].before = v.clone()
        if saved.outputs_before is not None:
            self._before = saved.outputs_before.clone()
            self._leads = True
