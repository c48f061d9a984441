"""Statistics of norms over all rows, while only some chunks have run in this step.

A norm over all nodes needs the mean and the variance of all rows. In a pipelined step the rows F of
the chunks that have run are known as they are now; all rows are known as they were in the last
step. The rows of F have moved, channel by channel, and the others are taken to have moved alike:

    s^2  = var F now / var F then
    var  = s^2 var of all then
    mean = mean F now + s (mean of all then - mean F then)

For the last chunk these are the variance and the mean of all rows as they are. The gradient flows
through the rows of F, those of earlier chunks included. So normalised rows do not depend on a shift
of all rows, or their scale, and neither has a gradient, as in exact training.

The variance of few rows is unreliable. So both variances of F are computed as if F had up to
`FLOOR` more rows, with the last step's variance of all rows; their number falls to 0 with the last
chunk.

What is kept are sums, which chunks and shards add to: of each channel the number of rows, and the
sums of x - c and of (x - c)^2, with c the mean of all rows in the last step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

FLOOR = 32.0
_TINY = 1e-12  # added to variances: a channel may be the same in all rows


def row_sums(rows: Tensor, center: Tensor) -> Tensor:
    """Return count, sum and sum of squares of `rows - center`, `[3, channels]`, in float64.

    Args:
        rows: `[num_rows, channels]`.
        center: `[channels]`, near the mean of the rows, at least in single precision.
    """
    away = rows - center
    first = away.sum(0).double()
    second = away.square_().sum(0).double()
    return torch.stack([torch.full_like(first, rows.size(0)), first, second])


def sums_by_chunk(rows: Tensor, counts: Sequence[int] | None, center: Tensor) -> Tensor:
    """Return the sums of rows that lie one chunk's after the other's, `[num_chunks, 3, channels]`.

    Args:
        rows: `[num_rows, channels]`.
        counts: How many rows each chunk has; None for one chunk.
        center: `[channels]`; see `row_sums`.
    """
    parts = [rows] if counts is None else torch.split(rows, list(counts))
    return torch.stack([row_sums(part, center) for part in parts])


def mean_and_var(sums: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of the rows that `row_sums` has summed."""
    count, first, second = sums.unbind(-2)
    share = first / count.clamp(min=1)
    var = second / count.clamp(min=1) - share.square()
    return center + share, var.clamp(min=0)


class RowMoments:
    """The statistics of one call of a norm, over several steps.

    Args:
        num_chunks: Chunks of the plan, K.
    """

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.then: list[Tensor | None] = []  # the last step's sums, by chunk; None if not known
        self.total: Tensor | None = None  # those of all rows
        self.center = torch.empty(0)
        self._clear()

    def _clear(self) -> None:
        self._own: dict[int, Tensor] = {}  # this step's, by chunk
        self._pooled: dict[int, Tensor] = {}  # those of a chunk and of the chunks before it
        self._pooled_then: dict[int, Tensor] = {}
        self._last = -1  # the chunk that ran last
        self._grad: Tensor | None = None

    def begin_step(self) -> None:
        """Make this step's sums those of the last step, if all chunks have run."""
        if self.is_complete:
            own = [self._own[chunk] for chunk in range(self.num_chunks)]
            self.set(own, self._pooled[self._last])
        self._clear()

    def set(self, then: Sequence[Tensor | None], total: Tensor) -> None:
        """Set the sums of the last step: `then` by chunk, `total` of all rows.

        Args:
            then: `[3, channels]` each, around `center`; None where it is not known.
            total: `[3, channels]`, around `center`.
        """
        mean, _ = mean_and_var(total, self.center)
        center = mean.to(self.center.dtype)
        shift = self.center.double() - center.double()
        self.then = [None if one is None else _moved_center(one, shift) for one in then]
        self.total, self.center = _moved_center(total, shift), center

    def add(self, chunk: int, sums: Tensor) -> Tensor:
        """Add the sums of a chunk that has run, `[3, channels]`; return those of all so far."""
        if chunk in self._pooled:  # computed again for backward
            return self._pooled[chunk]
        then = self.then[chunk]
        before = self._last
        self._own[chunk], self._last = sums, chunk
        own_then = sums if then is None else then
        if before < 0:
            self._pooled[chunk], self._pooled_then[chunk] = sums, own_then
        else:
            self._pooled[chunk] = self._pooled[before] + sums
            self._pooled_then[chunk] = self._pooled_then[before] + own_then
        if self.is_complete and self.total is not None:  # whether chunks were known then or not
            self._pooled_then[chunk] = self.total
        return self._pooled[chunk]

    def sums_of(self, rows: Tensor) -> Tensor:
        """Return the sums of `rows`, `[num_rows, channels]`, around the present center."""
        return row_sums(rows, self.center)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have run."""
        return len(self._own) == self.num_chunks

    def present(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and variance of the rows of all chunks that have run, and their number."""
        sums = self._pooled[self._last]
        return *mean_and_var(sums, self.center), sums[0]

    def add_grad(self, grad: Tensor) -> Tensor:
        """Add a chunk's gradient of the sums so far; return that of its own, later ones' included.

        Chunks come in the reverse of the order in which they ran.
        """
        self._grad = grad if self._grad is None else self._grad + grad
        return self._grad

    def mean_and_var(self, chunk: int, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of all rows as they are taken to be now, `[channels]` each.

        Args:
            chunk: The chunk that is running.
            sums: What `add` has returned for it.
        """
        assert self.total is not None
        # F has as many rows now as then, so the ratio of variances is that of spreads.
        count, first, second = sums.unbind(0)
        then_count, then_first, then_second = self._pooled_then[chunk].unbind(0)
        all_rows, _, all_second = self.total.unbind(0)
        var_then = (all_second / all_rows).clamp(min=0)  # sums are rounded
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


def _moved_center(sums: Tensor, shift: Tensor) -> Tensor:
    """Return sums around `center - shift` instead of `center`."""
    count, first, second = sums.unbind(0)
    moved = first + count * shift
    return torch.stack([count, moved, second + shift * (first + moved)])


class MomentStore:
    """The statistics of the norms of one stage.

    Args:
        num_chunks: Chunks of the plan, K.
    """

    kind = RowMoments

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._calls: dict[Hashable, RowMoments] = {}

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._calls)

    def __getitem__(self, key: Hashable) -> RowMoments:
        if key not in self._calls:
            self._calls[key] = self.kind(self._num_chunks)
        return self._calls[key]

    def begin_step(self) -> None:
        """Begin a training pass."""
        for one in self._calls.values():
            one.begin_step()

    def keep(
        self, key: Hashable, rows: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the statistics of the whole graph's rows, `[num_rows, channels]`.

        Args:
            key: The call.
            rows: One chunk's after the other's.
            counts: How many nodes each chunk has; None if the rows are not of nodes. If there are
                not as many rows as nodes, it is ignored.

        Returns:
            Mean and variance, `[channels]`, and how many rows there are.
        """
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        counts = counts if counts is not None and sum(counts) == rows.size(0) else None
        center = rows.mean(0)
        sums = sums_by_chunk(rows, counts, center)
        total = sums.sum(0)
        self.put(key, None if counts is None else sums, total, center)
        return *mean_and_var(total, center), total[0]

    def save(self, key: Hashable) -> dict[str, Tensor | None]:
        """Return what `load` takes, between two steps."""
        one = self._calls[key]
        one.begin_step()
        known = [sums for sums in one.then if sums is not None]
        is_known = len(known) == self._num_chunks
        return {
            "sums": torch.stack(known) if is_known else None,
            "total": one.total,
            "center": one.center,
        }

    def load(self, key: Hashable, sums: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Go on with the statistics of the last step.

        Args:
            key: The call.
            sums: `[num_chunks, 3, channels]` by chunk, around `center`; None if not known.
            total: `[3, channels]` of all rows, around `center`.
            center: `[channels]`.
        """
        one = self._calls[key] = RowMoments(self._num_chunks)
        one.then = [None] * self._num_chunks if sums is None else list(sums)
        one.total, one.center = total, center

    def put(self, key: Hashable, sums: Tensor | None, total: Tensor, center: Tensor) -> None:
        """Set the sums of the last step; see `load`."""
        one = self._calls[key] = RowMoments(self._num_chunks)
        one.center = center
        one.set([None] * self._num_chunks if sums is None else list(sums), total)
