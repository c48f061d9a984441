"""Statistics of norms over all rows, while only some chunks have run in this step.

Only the rows F of chunks that have run are current. All rows are assumed to have changed like F
since the last step (then), channel by channel; at the last chunk this is exact:

    s^2  = var F now / var F then
    var  = s^2 var of all then
    mean = mean F now + s (mean of all then - mean F then)

Gradients flow through all rows of F. So, as in exact training, a shift or a scale of all rows
changes no normalised row and has no gradient. The variance of few rows is unreliable: both
variances of F include up to `FLOOR` rows with the variance of all rows then, none at the last
chunk. Sums are of x - c and (x - c)^2, with c the mean of all rows then.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FLOOR = 32.0
_TINY = 1e-12  # added to variances: a channel may be constant


@functools.cache
def float_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of rows: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def row_sums(rows: Tensor, center: Tensor) -> Tensor:
    """Return count, sum and sum of squares of `rows - center`, `[3, channels]`, in float64.

    `center`: `[channels]`, near the mean of the rows, at least float32.
    """
    away = rows - center
    first = away.sum(0).double()
    second = away.square_().sum(0).double()
    return torch.stack([torch.full_like(first, rows.size(0)), first, second])


def sums_by_chunk(rows: Tensor, counts: Sequence[int] | None, center: Tensor) -> Tensor:
    """Return `row_sums` of consecutive chunks of `counts` rows, `[num_chunks, 3, channels]`."""
    parts = [rows] if counts is None else torch.split(rows, list(counts))
    return torch.stack([row_sums(part, center) for part in parts])


def mean_and_var(sums: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance from the sums of `row_sums`."""
    count, first, second = sums.unbind(-2)
    share = first / count.clamp(min=1)
    var = second / count.clamp(min=1) - share.square()
    return center + share, var.clamp(min=0)


class RowMoments:
    """Statistics of one call of a norm, over several steps."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.then: list[Tensor | None] = []  # the last step's sums, by chunk; None if unknown
        self.total: Tensor | None = None  # the last step's sums of all rows
        self.center = torch.empty(0)
        self._clear()

    def _clear(self) -> None:
        self._own: dict[int, Tensor] = {}  # this step's sums, by chunk
        self._pooled: dict[int, Tensor] = {}  # sums of a chunk and all chunks before it
        self._pooled_then: dict[int, Tensor] = {}
        self._last = -1  # the chunk that ran last
        self._grad: Tensor | None = None

    def begin_step(self) -> None:
        """Keep this step's sums as the last step's if all chunks have run."""
        if self.is_complete:
            own = [self._own[chunk] for chunk in range(self.num_chunks)]
            self.set(own, self._pooled[self._last])
        self._clear()

    def set(self, then: Sequence[Tensor | None], total: Tensor) -> None:
        """Set the last step's sums, `[3, channels]` each, and move `center` to the mean.

        `then` is by chunk, None if unknown. The sums passed in are around the old center.
        """
        if not self.center.numel():
            self.then, self.total = list(then), total
            return
        mean, _ = mean_and_var(total, self.center)
        center = mean.to(self.center.dtype)
        shift = self.center.double() - center.double()
        self.then = [None if one is None else _moved_center(one, shift) for one in then]
        self.total, self.center = _moved_center(total, shift), center

    def add(self, chunk: int, sums: Tensor) -> Tensor:
        """Add the sums of a chunk, `[3, channels]`; return the sums of all chunks so far."""
        if chunk in self._pooled:  # recomputed in backward
            return self._pooled[chunk]
        then = self.then[chunk] if self.then else None
        pooled, pooled_then = sums, sums if then is None else then
        if self._own:
            pooled = self._pooled[self._last] + pooled
            pooled_then = self._pooled_then[self._last] + pooled_then
        self._own[chunk], self._last = sums, chunk
        self._pooled[chunk], self._pooled_then[chunk] = pooled, pooled_then
        if self.is_complete and self.total is not None:  # also if sums by chunk are unknown
            self._pooled_then[chunk] = self.total
        return self._pooled[chunk]

    def pooled(self, chunk: int, sums: Tensor) -> Tensor:
        """Like `add`; gradients reach the sums of this chunk and of those before it."""
        pooled: Tensor = cast(Any, _Pooled).apply(sums, self, chunk)
        return pooled

    def sums_of(self, rows: Tensor) -> Tensor:
        return row_sums(rows, self.center)

    @property
    def is_complete(self) -> bool:
        return len(self._own) == self.num_chunks

    def present(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and number of the rows of all chunks that have run."""
        sums = self._pooled[self._last]
        return *mean_and_var(sums, self.center), sums[0]

    def add_grad(self, grad: Tensor) -> Tensor:
        """Add the gradient of a chunk's pooled sums; return that of its own: last chunks first."""
        self._grad = grad if self._grad is None else self._grad + grad
        return self._grad

    def mean_and_var(self, chunk: int, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate mean and variance of all rows now; `sums` is what `add` returned."""
        assert self.total is not None
        # F has as many rows now as then: sums of squares have the ratio of the variances.
        count, first, second = sums.unbind(0)
        then_count, then_first, then_second = self._pooled_then[chunk].unbind(0)
        all_rows, _, all_second = self.total.unbind(0)
        var_then = (all_second / all_rows).clamp(min=0)  # rounding may make it negative
        added = FLOOR * (1 - then_count / all_rows)
        mean_then = then_first / then_count.clamp(min=1)
        then_spread = (then_second - then_first * mean_then).clamp(min=0) + added * var_then
        per_spread = 1 / (then_spread + _TINY * (then_count + added))
        per_row = 1 / count.clamp(min=1)
        unmoved = (added * var_then + _TINY * (count + added)) * per_spread
        spread = torch.addcmul(second, first * per_row, first, value=-1).clamp(min=0)
        ratio = torch.addcmul(unmoved, spread, per_spread)
        mean = torch.addcmul(self.center.double(), first, per_row)
        var = torch.addcmul(torch.full_like(ratio, -_TINY), ratio, var_then + _TINY)
        return torch.addcmul(mean, ratio.sqrt(), mean_then, value=-1), var.clamp(min=0)


class _Pooled(torch.autograd.Function):
    """Sums, `[*]`, of a chunk and the chunks before it; backward adds those after it."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, moments: RowMoments, chunk: int) -> Tensor:
        ctx.moments = moments
        return moments.add(chunk, sums.detach()).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.moments.add_grad(grad), None, None


def _moved_center(sums: Tensor, shift: Tensor) -> Tensor:
    """Return sums around `center - shift` instead of `center`."""
    count, first, second = sums.unbind(0)
    moved = first + count * shift
    return torch.stack([count, moved, second + shift * (first + moved)])


class MomentStore:
    """Statistics of all norms of one stage, by call."""

    def __init__(self, num_chunks: int, kind: type[RowMoments] = RowMoments) -> None:
        self._num_chunks, self._kind = num_chunks, kind
        self.calls: dict[Hashable, RowMoments] = {}

    def __getitem__(self, key: Hashable) -> RowMoments:
        if key not in self.calls:
            self.calls[key] = self._kind(self._num_chunks)
        return self.calls[key]

    def begin_step(self) -> None:
        for one in self.calls.values():
            one.begin_step()

    def keep(
        self, key: Hashable, rows: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the statistics of all rows, `[num_rows, channels]`; return mean, variance and count.

        `counts` are the nodes of each chunk; ignored if they do not sum to `num_rows`.
        """
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        counts = counts if counts is not None and sum(counts) == rows.size(0) else None
        center = rows.mean(0)
        sums = sums_by_chunk(rows, counts, center)
        total = sums.sum(0)
        self.put(key, None if counts is None else sums, total, center)
        return *mean_and_var(total, center), total[0]

    def save(self, key: Hashable) -> dict[str, Tensor | None]:
        """Return the arguments of `load`; call between two steps."""
        one = self.calls[key]
        one.begin_step()
        known = [sums for sums in one.then if sums is not None]
        sums = torch.stack(known) if len(known) == self._num_chunks else None
        return {"sums": sums, "total": one.total, "center": one.center}

    def load(self, key: Hashable, sums: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Restore the last step's sums around `center`, `[channels]`.

        `sums`: `[num_chunks, 3, channels]`, None if unknown; `total`: `[3, channels]`, of all rows.
        """
        one = self.calls[key] = self._kind(self._num_chunks)
        one.then = [None] * self._num_chunks if sums is None else list(sums)
        one.total, one.center = total, center

    def put(self, key: Hashable, sums: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Like `load`, but also move the center to the rows' mean."""
        self.load(key, sums, total, center)
        self.calls[key].set(self.calls[key].then, total)
