"""Delayed gradients by one of two rules, as gradients are alike from step to step or not.

    much alike    training is led by them: what is late can make it swing, so it is damped more
    hardly alike  they are mostly noise, such as that of dropout: there is less to swing, and
                  damping takes away what long paths bring

Each layer has its own correlation, so those of one network may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history.delayed import DelayedGradients
from lightning_gnnpipe.history.gradients import GradientBuffer, GradientRule
from lightning_gnnpipe.history.saved import Adapted, SavedGradients
from lightning_gnnpipe.history.waiting import WaitingBuffer
from lightning_gnnpipe.types import ChunkView

EVERY_N_STEPS = 5
_SHARE = 0.3  # of the newest in the correlation
_SLICE = 2**24  # values that are multiplied at once
_BAND = 0.85  # it has to fall below so much of the threshold, so that rules do not change for noise


@dataclass(frozen=True)
class AdaptiveGradients(GradientRule):
    """`DelayedGradients` by one of two rules, for each linear layer by itself.

    With a_e the gradients of a chunk's outputs in step e, in one vector, in every fifth pipelined
    step, or the next one that follows a pipelined one:

        r = mean over chunks of <a_e, a_(e-1)> / (|a_e| |a_(e-1)|)        R += 0.3 (r - R)

    R is r at first. From the next step on `noisy` is used if R < 0.85 `threshold`, `steady` if
    R >= `threshold`, and in between the one that was; a run begins with `steady`. What waits when
    rules change is given as the former rule has made it. Chunks with gradients of zero, or that are
    not finite, say nothing. Layers that do not read histories in place have `steady` throughout:
    those that are not linear in what they read, such as attention, or whose edges are not the
    batch's own, and all with a `history_device`.

    Gradients of several batches, or of losses that take turns, are hardly alike for another reason
    than noise: take `AdaptiveGradients().steady` there.

    Source: ours.

    Args:
        noisy: Factors where gradients are hardly alike from one step to the next.
        steady: Factors where they are.
        threshold: Correlation from which on they are.

    Raises:
        ConfigError: If a rule has no lead, smooths or fades, or `threshold` is not finite.
    """

    noisy: DelayedGradients = field(
        default_factory=lambda: DelayedGradients(decay=0.75, scale=1.25, lead=0.3)
    )
    steady: DelayedGradients = field(
        default_factory=lambda: DelayedGradients(decay=0.5, scale=1.5, lead=0.5)
    )
    threshold: float = 0.18

    def __post_init__(self) -> None:
        for name in ("noisy", "steady"):
            rule = getattr(self, name)
            is_rule = isinstance(rule, DelayedGradients)
            if not (is_rule and rule.lead > 0 and rule.momentum == 0 and not rule.fades):
                raise ConfigError(
                    explain(
                        expected=f"'{name}' of AdaptiveGradients to be DelayedGradients with a "
                        "'lead' above 0, no 'momentum' and no 'fades'",
                        found=repr(rule),
                        remedy="The lead keeps the last gradients, which are compared with the "
                        "next; without it use DelayedGradients alone.",
                    )
                )
        if not isfinite(self.threshold):
            raise ConfigError(
                explain(
                    expected="'threshold' of AdaptiveGradients to be a finite number",
                    found=str(self.threshold),
                    remedy="It is a correlation: 0.18 is between noise and a common direction. "
                    "Above 1.2 'noisy' is used once it is known, at -1 or below 'steady'.",
                )
            )

    @property
    def scale(self) -> float:
        return self.steady.scale

    @property
    def scales(self) -> tuple[float, ...]:
        return self.steady.scale, self.noisy.scale

    def num_tables(self, *, recomputes: bool) -> int:
        return self.steady.num_tables(recomputes=recomputes)

    @property
    def num_halos(self) -> int:
        return self.steady.num_halos

    def make_buffer(self) -> GradientBuffer:
        return _AdaptiveBuffer(self)


class _AdaptiveBuffer(WaitingBuffer):
    """What waits for the next step, by the rule that the correlation asks for."""

    def __init__(self, rules: AdaptiveGradients) -> None:
        super().__init__(rules.steady)
        self._rules = rules
        self._correlation: float | None = None
        self._num_steps = 0  # pipelined ones, after the last that was measured
        self._sums: dict[int, Tensor] = {}  # <a, b>, <a, a>, <b, b> of this step, by chunk

    def carry_output(self, chunk: ChunkView, grad: Tensor) -> None:
        if self._has_last and self._num_steps >= EVERY_N_STEPS - 1:
            assert self._last is not None
            self._sums[chunk.index] = _products(grad, self._last[chunk.start : chunk.end])
        super().carry_output(chunk, grad)

    def drop(self) -> None:
        super().drop()
        self._sums.clear()  # of a step that has failed

    def end_step(self, *, is_exact: bool) -> None:
        self._num_steps += self._is_open and not is_exact
        super().end_step(is_exact=is_exact)

    @property
    def has_measured(self) -> bool:
        """Whether gradients were compared in this step; alike on all ranks with its rows."""
        return bool(self._sums)

    def measured(self, num_chunks: int) -> Tensor:
        """Return what `adapt` is given, but of this rank's rows alone, `[num_chunks, 3]`."""
        sums = torch.zeros(num_chunks, 3, dtype=torch.float64)
        sums[list(self._sums)] = torch.stack(list(self._sums.values())).cpu()
        return sums

    def adapt(self, sums: Sequence[Sequence[float]]) -> None:
        """Go on by the rule that this step's sums ask for."""
        self._sums.clear()
        self._num_steps = 0
        found = [p / sqrt(a) / sqrt(b) for p, a, b in sums if 0 < a < inf and 0 < b < inf]
        if not found:
            return
        newest, before = sum(found) / len(found), self._correlation
        self._correlation = newest if before is None else before + _SHARE * (newest - before)
        if self._correlation >= self._rules.threshold:
            self._use(self._rules.steady)
        elif self._correlation < _BAND * self._rules.threshold:
            self._use(self._rules.noisy)

    def save(self) -> SavedGradients | None:
        saved = super().save() or SavedGradients()
        is_noisy = self._rule == self._rules.noisy
        adapted = Adapted(self._correlation, is_noisy, self._num_steps)
        return replace(saved, adapted=adapted)

    def load(self, saved: SavedGradients) -> None:
        if saved.adapted is not None:
            self._correlation, is_noisy, self._num_steps = saved.adapted
            self._use(self._rules.noisy if is_noisy else self._rules.steady)
        super().load(saved)


def adapt_buffers(
    buffers: Iterable[GradientBuffer], num_chunks: int, sum_over_ranks: Callable[[Tensor], None]
) -> None:
    """Let rules follow what buffers have measured in a step.

    Args:
        buffers: In the same order on all ranks that hold rows of these histories.
        num_chunks: Chunks of the plan.
        sum_over_ranks: Sums a tensor over those ranks, in place; called on all of them or none.
    """
    found = [one for one in buffers if isinstance(one, _AdaptiveBuffer) and one.has_measured]
    if found:
        sums = torch.stack([one.measured(num_chunks) for one in found])
        sum_over_ranks(sums)
        for one, total in zip(found, sums.tolist(), strict=True):
            one.adapt(total)


def _products(grad: Tensor, last: Tensor) -> Tensor:
    """Return `[3]`: <grad, last>, <grad, grad>, <last, last>, summed over slices."""
    dtype = torch.promote_types(torch.promote_types(grad.dtype, last.dtype), torch.float32)
    total = torch.zeros(3, dtype=torch.float64, device=grad.device)
    slices = (torch.split(one.reshape(-1), _SLICE) for one in (grad, last))
    for new, old in zip(*slices, strict=True):
        a, b = new.to(dtype), old.to(dtype)
        total += torch.stack([a.dot(b), a.dot(a), b.dot(b)])
    return total
