"""Statistics of norms over all rows, while only some chunks have run in this step.

Only the rows F of chunks that have run are current. All rows are assumed to have changed like F
since the last step (then), channel by channel; at the last chunk this is exact:

    s^2  = var F now / var F then
    var  = s^2 var of all then
    mean = mean F now + s (mean of all then - mean F then)

Gradients flow through all rows of F. So, as in exact training, a shift or a scale of all rows
changes no normalised row and has no gradient. The variance of few rows is unreliable: both
variances of F include up to `FLOOR` rows with the variance of all rows then, none at the last
chunk.

Each chunk adds the means of x - c and (x - c)^2, with c the mean of all rows then, to the means
of F now and then, four rows of one tensor: as many operations for any number of chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOOR = 32.0
_TINY = 1e-12  # the least variance: a channel may be constant


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


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Mean and variance of all rows, as a chunk takes them to be.

    Attributes:
        mean: Minus the center.
        scales: `[2, channels]` variance plus the norm's epsilon, and its root.
        room: Empty, for other scales.
        change: The deviation of F now by that then.
        num_rows: Of F.
        now: `[2, channels]` means of x - c and (x - c)^2 over F now; `then` in the last step.
        spread: The variance of F now with the rows of `FLOOR`; `spread_then` in the last step.
    """

    mean: Tensor
    scales: Tensor
    room: Tensor
    change: Tensor
    num_rows: int
    now: Tensor
    then: Tensor
    spread: Tensor
    spread_then: Tensor


class RowMoments:
    """Statistics of one call of a norm, over several steps.

    Args:
        means: `[num_chunks, 3, channels]` count and means of x - c and (x - c)^2, in the last
            step; None if unknown.
        total: `[3, channels]`, the same of all rows.
        center: `[channels]`, the mean of all rows.
    """

    def __init__(
        self, num_chunks: int, means: Tensor | None, total: Tensor, center: Tensor
    ) -> None:
        self.num_chunks, self._is_known = num_chunks, means is not None
        self._counts, known = [0] * num_chunks, center.new_zeros(num_chunks, 2, center.numel())
        if means is not None:
            self._counts = [int(count) for count in means[:, 0, 0].tolist()]
            known.copy_(means[:, 1:])
        var = (total[2] - total[1].square()).clamp(min=0)
        self._set(known, int(total[0, 0]), center, var)
        self.is_of_messages = False  # whose number a step may change, as dropped edges do
        self._clear()

    def _set(self, means: Tensor, num_rows: int, center: Tensor, var: Tensor) -> None:
        self._means = torch.stack([means, means])  # this step's and the last step's
        self.num_rows, self.center, self.var = num_rows, center, var.to(center.dtype)
        self._least = self.var + _TINY
        self._slopes = torch.stack([torch.ones_like(center), self._least])  # see `add`
        self._epsilons: dict[float, Tensor] = {}
        self._estimates = center.new_empty(len(means), 6, center.numel())
        self._own_grad = torch.empty_like(self._slopes)

    def _clear(self) -> None:
        self._runs: dict[int, Estimate] = {}  # of this step, by chunk
        self._pool: Tensor | None = None  # of F, see `_means`: `[2, 2, channels]`
        self._num_run = 0  # rows of F
        self._grads: Tensor | None = None

    def begin_step(self) -> None:
        """Keep this step's means as the last step's if all chunks have run."""
        if self.is_complete:
            means, num_rows = self._means[0], sum(self._counts)
            shares = means.new_tensor(self._counts) / max(num_rows, 1)
            first, second = (means * shares.view(-1, 1, 1)).sum(0)
            center = self.center + first
            shift = center - self.center  # rounded
            var = (second + shift * (shift - 2 * first)).clamp(min=0)
            square = means[:, 1] + shift * (shift - 2 * means[:, 0])
            self._set(torch.stack([means[:, 0] - shift, square], 1), num_rows, center, var)
            self._is_known = True
        self._clear()

    def add(self, chunk: int, rows: Tensor, eps: float, shards: Any) -> tuple[Tensor, Estimate]:
        """Return `rows - center`, and the estimate of all rows when this chunk has run."""
        away = rows - self.center
        if chunk in self._runs:  # recomputed in backward
            return away, self._runs[chunk]
        own, count = self._means[:, chunk], rows.size(0)
        if shards is not None:
            sums = torch.cat([away.sum(0), away.square().sum(0), away.new_full((1,), count)])
            sums = shards.sum(sums)
            fixed = 0 if self.is_of_messages else self._counts[chunk]
            count = fixed or int(sums[-1])  # waits for the device
            torch.div(sums[:-1].view_as(own[0]), max(count, 1), out=own[0])
        elif count:
            torch.mean(away, 0, out=own[0, 0])
            torch.mean(away.square(), 0, out=own[0, 1])
        else:
            own[0] = 0
        if not self._is_known:
            own[1] = own[0]
        self._counts[chunk] = count
        self._num_run = num_run = self._num_run + count
        share = count / max(num_run, 1)
        pool = own if self._pool is None else torch.lerp(self._pool, own, share)
        if not self._is_known and len(self._runs) == self.num_chunks - 1:
            pool = pool.clone()
            pool[1, 0], pool[1, 1] = 0, self.var
        self._pool = pool
        spreads = torch.addcmul(pool[:, 1], pool[:, 0], pool[:, 0], value=-1)
        added = FLOOR * (1 - num_run / self.num_rows) / max(num_run, 1)
        if added > 0:
            spreads.add_(self._least, alpha=added)
        spreads.clamp_(min=_TINY)
        if eps not in self._epsilons:
            self._epsilons[eps] = self.var.new_tensor([[0.0], [eps]])
        # Ratio of the variances, variance, and the roots of both.
        known = self._estimates[chunk]
        ratio = spreads[0] / spreads[1]
        torch.addcmul(self._epsilons[eps], ratio, self._slopes, out=known[:2])
        torch.sqrt(known[:2], out=known[2:4])
        mean = torch.addcmul(pool[0, 0], known[2], pool[1, 0], value=-1)
        found = Estimate(mean, known[1:4:2], known[4:], known[2], num_run, *pool, *spreads)
        self._runs[chunk] = found
        return away, found

    def add_grad(self, found: Estimate, of_mean: Tensor, of_var: Tensor, shards: Any) -> Tensor:
        """Add a chunk's gradients; last chunks first.

        `of_mean` is minus the gradient of the estimated mean, `of_var` minus twice that of the
        variance. Returns (a, b), `[2, channels]`: the rows' gradient is a + b (rows - center).
        """
        second = of_var * self._least
        second.addcdiv_(of_mean * found.then[0], found.change, value=-1)
        first, kept = self._own_grad
        second.div_(found.spread_then)
        clamped = torch.ops.aten.threshold_backward
        clamped.grad_input(second, found.spread, _TINY, grad_input=kept)
        torch.addcmul(of_mean, found.now[0], kept, value=-1, out=first)
        share = -1 / max(found.num_rows, 1)
        if self._grads is None:
            self._grads = self._own_grad * share
        else:
            self._grads = torch.add(self._grads, self._own_grad, alpha=share)
        return self._grads if shards is None else shards.sum(self._grads)

    @property
    def is_complete(self) -> bool:
        return len(self._runs) == self.num_chunks

    def present(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and number of the rows of all chunks that have run."""
        assert self._pool is not None
        first, second = self._pool[0]
        var = (second - first.square()).clamp(min=0)
        return self.center + first, var, var.new_tensor(float(self._num_run))

    def save(self) -> dict[str, Tensor | None]:
        """Return the arguments of `MomentStore.load`; call between two steps."""
        self.begin_step()
        var, known = self.var, self._means[1]
        counts = known.new_tensor(self._counts).view(-1, 1, 1).expand_as(known[:, :1])
        total = torch.stack([torch.full_like(var, self.num_rows), torch.zeros_like(var), var])
        means = torch.cat([counts, known], 1) if self._is_known else None
        return {"means": means, "total": total, "center": self.center}


class MomentStore:
    """Statistics of all norms of one stage, by call."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self.calls: dict[Hashable, RowMoments] = {}

    def of(self, key: Hashable, rows: Tensor) -> RowMoments:
        """Return the statistics of a call on `rows` of a chunk."""
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
        rows = rows.to(float_of(rows.dtype))
        counts = counts if counts is not None and sum(counts) == rows.size(0) else None
        center = rows.mean(0)
        sums = sums_by_chunk(rows, counts, center)
        total = sums.sum(0)
        self.put(key, None if counts is None else sums, total, center)
        return *mean_and_var(total, center), total[0]

    def put(self, key: Hashable, sums: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Keep `row_sums` of chunks, `[num_chunks, 3, channels]`, and of all rows."""
        means = None if sums is None else _per_row(sums.detach())
        self.load(key, means, _per_row(total.detach()), center.detach())

    def load(self, key: Hashable, means: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Restore the last step's statistics; see `RowMoments`."""
        self.calls[key] = RowMoments(self._num_chunks, means, total, center)


def _per_row(sums: Tensor) -> Tensor:
    """Return count and means from the sums of `row_sums`."""
    count = sums[..., :1, :]
    return torch.cat([count, sums[..., 1:, :] / count.clamp(min=1)], -2)
