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
of F now and then, four rows of one tensor: as many operations for any number of chunks. What
these operations read and write is found once: see `_Views`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_gnnpipe.staleness.store import StepOrder

_Sum = Callable[[Tensor], Tensor]  # over shards
FLOOR = 32.0  # unchanged rows assumed in means of rows: few rows say little about all
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


# Rows of a chunk's numbers in `RowMoments.table`; the last three are of the norm.
RATIO, VAR, CHANGE, ROOT, MEAN, NOW, THEN, SPREAD, SPREAD_THEN = range(9)
KEPT, NORM_MEAN, NORM_VAR = range(9, 12)


def _view(own: Tensor, table: Tensor) -> _Views:
    numbers = table.unbind()
    pairs = RATIO, CHANGE, NOW, SPREAD  # the first of two rows
    return _Views(own, own[0, 0], own[0, 1], numbers, *(table[one : one + 2] for one in pairs))


def _share_of_rows(count: int, num_run: int, num_rows: int) -> tuple[float, float, float]:
    """Return three factors for statistics over `num_run` of `num_rows` rows, `count` just added.

    The new rows' share; each row's part of the `FLOOR` rows, 0 at the last chunk; minus one row's
    share.
    """
    num_run = max(num_run, 1)
    return count / num_run, FLOOR * (1 - num_run / max(num_rows, 1)) / num_run, -1 / num_run


def _shares(counts: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return `_share_of_rows` by chunk, `[num_chunks, 3]`."""
    num_run, found = 0, torch.empty(len(counts), 3, dtype=torch.float64, device="cpu")
    for chunk in order:
        num_run += counts[chunk]
        found[chunk] = found.new_tensor(_share_of_rows(counts[chunk], num_run, sum(counts)))
    return found


class _Views(NamedTuple):
    """Parts of `RowMoments.table`, and of the means of one chunk: what `RowMoments.add` writes."""

    own: Tensor  # `[2, 2, channels]` now and then, means of x - c and of (x - c)^2
    first: Tensor
    second: Tensor
    numbers: tuple[Tensor, ...]  # by name, as RATIO
    ratio_and_var: Tensor
    roots: Tensor
    means: Tensor
    spreads: Tensor


class RowMoments:
    """Statistics of one call of a norm, over several steps.

    Attributes:
        table: `[num_chunks, 12, channels]` each chunk's estimates of all rows: RATIO of
            the variances of F now and then; VAR, the variance plus the norm's epsilon; CHANGE and
            ROOT, the roots of both; MEAN; NOW and THEN, means over F, THEN of x - c; SPREAD and
            SPREAD_THEN, variances of F with the rows of `FLOOR`.
        numbers: Rows of `table` by chunk and name.
    """

    def __init__(self, num_chunks: int, center: Tensor, sum_over_shards: _Sum | None) -> None:
        self.num_chunks, width = num_chunks, center.numel()
        self._sum_over_shards = sum_over_shards
        self.is_of_messages = False  # rows are messages: their number may differ between steps
        self._counts, self._last_counts = [0] * num_chunks, tuple[int, ...]()
        self._offsets = center.new_zeros(2, width)  # from means of x - c to NOW and THEN
        self.center, self.var = self._offsets[0], torch.empty_like(center)
        self._slopes = center.new_ones(2, width)  # of RATIO and VAR
        self._least = self._slopes[1]  # the variance, at least `_TINY`
        self._epsilons: dict[float, Tensor] = {}
        self._means = center.new_zeros(2, num_chunks, 2, width)  # this and the last step's
        self._pool = center.new_zeros(2, 2, width)  # of F, see `_means`
        self._pools = self._pool.unbind(1)
        self.table = center.new_zeros(num_chunks, 12, width)
        self._views = [*map(_view, self._means.unbind(1), self.table)]
        self.numbers = [one.numbers for one in self._views]
        self._own_grad, self._grads = center.new_zeros(2, width), center.new_zeros(2, width)
        self._own_grads = self._own_grad.unbind()
        # By chunk, see `_share_of_rows`; None: counts may be new.
        self._shares: list[tuple[Tensor, ...]] | None = None
        # What norms compute once for all chunks' backward, `[num_factors, num_chunks, channels]`.
        self.prepare: Callable[[RowMoments], Sequence[Tensor]] | None = None
        self._factors = center.new_empty(0)
        self.factors: list[tuple[Tensor, ...]] = []  # by chunk

    def load(self, means: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Take up the last step's statistics.

        `means`: `[num_chunks, 3, channels]` count and means of x - c and (x - c)^2; None if
        unknown. `total`: `[3, channels]`, the same of all rows. `center`: their mean.
        """
        self._is_known, self._counts = means is not None, [0] * self.num_chunks
        if means is not None:
            self._counts = [int(count) for count in means[:, 0, 0].tolist()]
            self._means.copy_(means[:, 1:])
        self._last_counts = (*self._counts,)
        self._take(int(total[0, 0]), center, total[2] - total[1].square())
        self._clear()

    def _take(self, num_rows: int, center: Tensor, var: Tensor) -> None:
        self.num_rows = num_rows
        self.center.copy_(center)
        self.var.copy_(var).clamp_(min=0)
        torch.clamp(self.var, min=_TINY, out=self._least)

    def _clear(self) -> None:
        self._runs: dict[int, Tensor] = {}  # this step's chunks: the third of `_share_of_rows`
        self._num_run = 0  # rows of F
        self._pool.zero_()
        self._grads.zero_()

    def begin_step(self, order: StepOrder) -> None:
        """Begin a step of chunks in `order`."""
        self._keep_step()
        self._shares, counts = None, (*self._counts,)
        if self._is_known and counts == self._last_counts:  # assume the same counts again
            shares = order.kept(counts, self.center, lambda _: _shares(counts, order.chunks))
            self._shares = [one.unbind() for one in shares]
        self._last_counts = counts

    def _keep_step(self) -> None:
        """Keep this step's means as the last step's if all chunks have run."""
        if self.is_complete:
            means, num_rows = self._means[0], sum(self._counts)
            shares = means.new_tensor(self._counts) / max(num_rows, 1)
            first, second = (means * shares.view(-1, 1, 1)).sum(0)
            center = self.center + first
            shift = center - self.center  # rounded
            square = means[:, 1] + shift * (shift - 2 * means[:, 0])
            self._means.copy_(torch.stack([means[:, 0] - shift, square], 1))
            self._take(num_rows, center, second + shift * (shift - 2 * first))
            self._is_known = True
        self._clear()

    def add(self, chunk: int, rows: Tensor, eps: float) -> None:
        """Write to `table` what all rows are when this chunk has run."""
        if chunk in self._runs:  # recomputed in backward
            return
        view, count, pools = self._views[chunk], rows.size(0), self._pools
        own, first, second, numbers, ratio_and_var, roots, means, spreads = view
        if count:
            mean, var = torch.batch_norm_update_stats(rows, None, None, 0.0)
            torch.sub(mean, self.center, out=first)
            torch.addcmul(var, first, first, out=second)
        else:
            own[0] = 0
        if self._sum_over_shards is not None:
            sums = self._sum_over_shards(torch.cat([own[0].view(-1), first.new_ones(1)]) * count)
            fixed = 0 if self.is_of_messages else self._counts[chunk]
            count = fixed or int(sums[-1])  # waits for the device
            torch.div(sums[:-1].view_as(own[0]), max(count, 1), out=own[0])
        if not self._is_known:
            own[1] = own[0]
        if count != self._counts[chunk]:
            self._shares, self._counts[chunk] = None, count
        self._num_run = num_run = self._num_run + count
        if self._shares is None:
            shares = rows.new_tensor(_share_of_rows(count, num_run, self.num_rows)).unbind()
        else:
            shares = self._shares[chunk]
        share, floor, self._runs[chunk] = shares
        pool = self._pool.lerp_(own, share)
        if not self._is_known and self.is_complete:
            pool[1, 0], pool[1, 1] = 0, self.var
        if eps not in self._epsilons:
            self._epsilons[eps] = self.var.new_tensor([[0.0], [eps]])
        torch.add(pools[0], self._offsets, out=means)
        torch.addcmul(pools[1], pools[0], pools[0], value=-1, out=spreads)
        spreads.addcmul_(self._least, floor).clamp_(min=_TINY)
        ratio = numbers[SPREAD] / numbers[SPREAD_THEN]
        torch.addcmul(self._epsilons[eps], ratio, self._slopes, out=ratio_and_var)
        torch.sqrt(ratio_and_var, out=roots)
        torch.addcmul(numbers[NOW], numbers[CHANGE], numbers[THEN], value=-1, out=numbers[MEAN])

    @property
    def shares(self) -> Tensor | None:
        """The first of all factors of `_share_of_rows`; None if numbers of rows may change."""
        return None if self._shares is None else self._shares[0][0]

    def has_run(self, chunk: int) -> bool:
        return chunk in self._runs

    def note(self, chunk: int) -> None:
        """Note that a CUDA graph has done what `add` does."""
        assert self._shares is not None
        self._num_run += self._counts[chunk]
        self._runs[chunk] = self._shares[chunk][2]

    def forget(self, chunk: int) -> None:
        """Undo `add`, before the chunk runs again."""
        if self._runs.pop(chunk, None) is not None:
            self._num_run -= self._counts[chunk]

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Return two factors for the gradient g of F's mean of (x - c)^2, for all chunks.

        Each is `[num_chunks, channels]`. -2 g is the first times -2 (gradient of VAR) plus the
        second times -(gradient of MEAN).
        """
        known = self.table.unbind(1)
        share = torch.where(known[SPREAD] > _TINY, 1 / known[SPREAD_THEN], 0.0)
        return share * self._least, -share * known[THEN] / known[CHANGE]

    def add_grad(
        self, chunk: int, of_mean: Tensor, of_square: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Add a chunk's gradients; last chunks first.

        `of_mean` is minus the gradient of MEAN. `of_square`: two pairs whose products sum to -2 g,
        see `slopes`. Returns (a, b), `[2, channels]`: the rows' gradient is a + b rows.
        """
        first, second = self._own_grads
        (one, by_one), (other, by_other) = of_square
        torch.mul(one, by_one, out=second).addcmul_(other, by_other)
        torch.addcmul(of_mean, self.numbers[chunk][NOW], second, value=-1, out=first)
        self._grads.addcmul_(self._own_grad, self._runs[chunk])
        return self._grads if self._sum_over_shards is None else self._sum_over_shards(self._grads)

    @property
    def is_complete(self) -> bool:
        return len(self._runs) == self.num_chunks

    def after_forward(self) -> None:
        """Prepare the backward phase."""
        if self.prepare is None or not self._runs:
            return
        found = torch.stack([*self.prepare(self)])
        if self._factors.shape != found.shape:
            self._factors = torch.empty_like(found)
            self.factors = [one.unbind() for one in self._factors.unbind(1)]
        self._factors.copy_(found)

    def present(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and number of the rows of all chunks that have run."""
        first, second = self._pool[0]
        var = (second - first.square()).clamp(min=0)
        return self.center + first, var, var.new_tensor(float(self._num_run))

    def save(self) -> dict[str, Tensor | None]:
        """Return the arguments of `MomentStore.load`; call between two steps."""
        self._keep_step()
        var, known = self.var, self._means[1]
        counts = known.new_tensor(self._counts).view(-1, 1, 1).expand_as(known[:, :1])
        total = torch.stack([torch.full_like(var, self.num_rows), torch.zeros_like(var), var])
        means = torch.cat([counts, known], 1) if self._is_known else None
        return {"means": means, "total": total, "center": self.center}


class MomentStore:
    """Statistics of all norms of one stage, by call; unless it `keeps` them, of one pass."""

    def __init__(
        self, num_chunks: int, sum_over_shards: _Sum | None = None, *, keeps: bool = True
    ) -> None:
        self._num_chunks, self._sum_over_shards, self._keeps = num_chunks, sum_over_shards, keeps
        self.calls: dict[Hashable, RowMoments] = {}

    def of(self, key: Hashable, rows: Tensor) -> RowMoments:
        """Return the statistics of a call on `rows` of a chunk."""
        return self.calls[key]

    def begin_step(self, order: StepOrder) -> None:
        for one in self.calls.values():
            one.begin_step(order)

    def after_forward(self) -> None:
        for one in self.calls.values():
            one.after_forward()

    def keep(
        self, key: Hashable, rows: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute statistics of all rows, and keep them; return mean, variance and count.

        `rows`: of this rank, `[num_rows, channels]`. `counts`: the nodes of each chunk; ignored if
        they do not sum to the rows of all ranks.
        """
        rows = rows.to(float_of(rows.dtype))
        over, sizes = self._sum_over_shards, [rows.size(0), sum(counts or (-1,))]
        total = rows.sum(0)
        if over is not None:
            share = over(torch.cat([total, total.new_tensor(sizes)]))
            total, sizes = share[:-2], share[-2:].tolist()
        counts = counts if sizes[0] == sizes[1] else None  # all ranks decide alike
        center = total / max(sizes[0], 1)
        sums = sums_by_chunk(rows, counts, center)
        sums = sums if over is None else over(sums)
        total = sums.sum(0)
        if self._keeps:
            self.put(key, None if counts is None else sums, total, center)
        return *mean_and_var(total, center), total[0]

    def put(self, key: Hashable, sums: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Keep `row_sums` of chunks, `[num_chunks, 3, channels]`, and of all rows."""
        means = None if sums is None else _per_row(sums.detach())
        self.load(key, means, _per_row(total.detach()), center.detach())

    def load(self, key: Hashable, means: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Take up the last step's statistics; see `RowMoments`."""
        known, kind = self.calls.get(key), (center.shape, center.dtype, center.device)
        if known is None or kind != (known.center.shape, known.center.dtype, known.center.device):
            known = self.calls[key] = RowMoments(self._num_chunks, center, self._sum_over_shards)
        known.load(means, total, center)


def _per_row(sums: Tensor) -> Tensor:
    """Return count and means from the sums of `row_sums`."""
    count = sums[..., :1, :]
    return torch.cat([count, sums[..., 1:, :] / count.clamp(min=1)], -2)
