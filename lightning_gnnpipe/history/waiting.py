"""What waits of gradients between two steps: those of readers' halos, or of linear outputs.

In: the gradients that chunks have, in backward. Out: what their rows are given, in this step for
rows that were read fresh, in the next for stale ones, by the factors of `DelayedGradients`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gnnpipe.history.gradients import GradientBuffer, Where, sized
from lightning_gnnpipe.history.saved import SavedGradients

if TYPE_CHECKING:
    from lightning_gnnpipe.history.delayed import DelayedGradients
    from lightning_gnnpipe.types import ChunkView


@dataclass(slots=True)
class _Waiting:
    """What a reader's halo is given in the next step, and with a lead what it was last."""

    positions: Tensor
    late: Tensor
    last: Tensor | None


class WaitingBuffer(GradientBuffer):
    """What waits for the next step: for each reader's halo, or a linear layer's outputs.

    With late_e what is given in step e, the formulas of `DelayedGradients` are one recursion:

        late_(e+1) = momentum late_e + (1 - momentum) decay ((1 + lead) a_e - lead a_(e-1))

    All of it is divided by `scale`, which is on all that is taken.
    """

    def __init__(self, rule: DelayedGradients) -> None:
        super().__init__(rule.scale)
        self._full = self._rule = rule  # at the largest learning rate, at the present one
        self._decay = rule.decay / rule.scale
        self._halos: dict[int, _Waiting] = {}  # by reader
        self._came: set[int] = set()  # readers, within a step
        self._total: Tensor | None = None  # of all readers, within a step
        self._has_total = False
        # Outputs: what is late, and the last gradients. A chunk that comes replaces the one by its
        # gradients, the other by what is late in the next step; then they change places.
        self._outputs: Tensor | None = None
        self._last: Tensor | None = None
        self._waits = self._has_last = self._is_open = False

    def _use(self, rule: DelayedGradients) -> None:
        """Go on by another rule; what waits is given as it is."""
        if rule == self._rule:
            return
        scale, output_scale = self.scale, self._output_scale
        self._rule, self.scale = rule, rule.scale
        self._decay = rule.decay / rule.scale
        self._scale_late(scale / self.scale, output_scale / self._output_scale)

    def follow_rate(self, share: float) -> None:
        if self._full.fades:
            self._use(self._full.at_rate(share))

    def _scale_late(self, of_halos: float, of_outputs: float) -> None:
        for waiting in self._halos.values():
            waiting.late.mul_(of_halos)
        if self._waits and self._outputs is not None:
            self._outputs.mul_(of_outputs)

    @property
    def _output_scale(self) -> float:
        """What is late of outputs is given so many times: without a filter it is not damped yet."""
        return self.scale if self._rule.is_filtered else self._rule.decay

    def add(self, chunk: ChunkView, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        own = grad.to(like.device)
        total = self._sum_halos(own.dtype, like)
        total.index_add_(0, positions, own.to(total.dtype))
        old = self._halos.get(chunk.index)
        if old is not None:
            total.index_add_(0, old.positions, old.late.to(total.dtype), alpha=-1)
        has_last = old is not None and old.last is not None
        late = old.last if old is not None and old.last is not None else torch.empty_like(own)
        self._carry(late, own, None if old is None else old.late, has_last=has_last)
        last = own.clone() if self._rule.lead else None
        self._halos[chunk.index] = _Waiting(positions, late, last)
        self._came.add(chunk.index)

    def _take(self, rows: Where, like: Tensor) -> Tensor | None:
        if not self._halos and not self._has_total:
            return None
        known = next((one.late.dtype for one in self._halos.values()), torch.float32)
        return self._sum_halos(known, like)[rows]

    def _sum_halos(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return the sum of what readers have, `[num_rows, *]`: what is late until they come."""
        if self._has_total:
            assert self._total is not None
            return self._total
        wide = torch.promote_types(dtype, torch.float32)  # differences of halves are too coarse
        self._total = sized(self._total, wide, like).zero_()
        for waiting in self._halos.values():
            self._total.index_add_(0, waiting.positions, waiting.late.to(wide))
        self._has_total = True
        return self._total

    def _carry(self, out: Tensor, grad: Tensor, late: Tensor | None, *, has_last: bool) -> None:
        """Write what is given in the next step over the last gradients, if `out` has them."""
        decay, momentum, lead = self._decay, self._rule.momentum, self._rule.lead
        if has_last:
            out.lerp_(grad.to(out.dtype), 1 + lead)
        else:
            out.copy_(grad)
        if late is not None and momentum:
            out.mul_(decay * (1 - momentum)).add_(late, alpha=momentum)
        elif decay != 1.0:
            out.mul_(decay)

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, None]:
        if not self._is_open:
            self._open(dtype, like)
        assert self._outputs is not None
        if self._rule.is_filtered:
            self.carry_output(chunk, grad)
        self._outputs[chunk.start : chunk.end] = grad
        return self._outputs, None

    def carry_output(self, chunk: ChunkView, grad: Tensor) -> None:
        """Write what the chunk is given late in the next step over its last gradients."""
        assert self._outputs is not None and self._last is not None
        late = self._outputs[chunk.start : chunk.end] if self._waits else None
        out = self._last[chunk.start : chunk.end]
        self._carry(out, grad, late, has_last=self._has_last)

    def _open(self, dtype: torch.dtype, like: Tensor) -> None:
        """Begin a step."""
        self._is_open = True
        self._outputs = sized(self._outputs, dtype, like)
        if self._rule.is_filtered:
            last = sized(self._last, dtype, like)
            self._has_last = self._has_last and last is self._last
            self._last = last
        elif self._decay != 1.0:
            self._outputs.mul_(self._decay)

    def end_step(self, *, is_exact: bool) -> None:
        self._has_total = False
        if is_exact:
            self.drop()
        else:  # of a layer that has no gradients for now nothing waits
            self._halos = {one: self._halos[one] for one in self._halos if one in self._came}
        if self._is_open and not is_exact:
            if self._rule.is_filtered:
                self._outputs, self._last = self._last, self._outputs
            self._waits, self._has_last = True, self._rule.lead > 0
        elif self._waits:
            self._drop_outputs()
        self._is_open = False
        self._came.clear()

    def drop(self) -> None:
        """Forget what waits."""
        self._halos.clear()
        self._drop_outputs()

    def _drop_outputs(self) -> None:
        if self._outputs is not None:
            self._outputs.zero_()
        self._waits = self._has_last = False

    def rescale(self, factor: float | None) -> None:
        if factor is None:
            self.drop()
            return
        rows = [one for waiting in self._halos.values() for one in (waiting.late, waiting.last)]
        for one in (*rows, self._outputs, self._last):
            if one is not None:
                one.mul_(factor)

    def save(self) -> SavedGradients | None:
        if not self._waits and not self._halos:
            return None
        return SavedGradients(
            self._outputs if self._waits else None,
            {chunk: (one.positions, one.late) for chunk, one in self._halos.items()},
            self._last if self._has_last else None,
            {
                chunk: (one.positions, one.last)
                for chunk, one in self._halos.items()
                if one.last is not None
            },
            scale=self.scale,
            output_scale=self._output_scale,
        )

    def load(self, saved: SavedGradients) -> None:
        last = saved.last_halos if self._rule.lead else {}
        self._halos = {
            chunk: _Waiting(where, late.clone(), last[chunk][1].clone() if chunk in last else None)
            for chunk, (where, late) in saved.halos.items()
        }
        self._outputs = None if saved.outputs is None else saved.outputs.clone()
        self._waits = saved.outputs is not None
        if self._rule.lead and saved.last_outputs is not None:
            self._last, self._has_last = saved.last_outputs.clone(), True
        is_used = self._rule.decay > 0
        self._scale_late(
            is_used * saved.scale / self.scale,
            is_used * saved.output_scale / (self._output_scale or 1.0),
        )
