"""What a step collects chunk by chunk: gradients of rows and their mean drift; copies to the host.

    drift = sum over the rows of chunks that have run of (row now - row then)
            / (the number of these rows + FLOOR)

An optimizer step changes most rows alike. Autograd treats stale rows and the drift as constants.

Copies between layers on a GPU and histories on the host do not stop the host:

    compute stream   c: layers .. rows .. layers ..   c + 1: layers .. rows .. layers
    copy stream                     `-> host                             `-> host
    host             c + 1 reads rows of c: waits for that copy alone, gathers, starts the copy back

Tables on the host lie in pinned memory. Between other devices copies are plain, and done at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk
from lightning_gnnpipe.staleness.method import HistoryOptions

Wait = Callable[[], object]


def done() -> None:
    """Wait for a copy that is done."""


class HostCopies:
    """Starts copies in both directions; `device` of histories is None for that of the layers."""

    def __init__(self, device: torch.device | None) -> None:
        is_host = device is not None and device.type == "cpu"
        self._pins = is_host and torch.cuda.is_available()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def table(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory on `device`; pinned if it is the host of layers on a GPU."""
        pins = self._pins and device.type == "cpu"
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pins)

    def send(self, rows: Tensor, place: Tensor) -> Wait:
        """Start to copy `rows` to `place`; return a function that waits for it."""
        if not (rows.is_cuda and place.is_pinned()):
            place.copy_(rows)
            return done
        if rows.device not in self._streams:
            self._streams[rows.device] = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        stream = self._streams[rows.device]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            place.copy_(rows, non_blocking=True)
            event.record(stream)
        rows.record_stream(stream)  # or its memory could be used again before it is copied
        return event.synchronize

    def fetch(self, rows: Tensor, positions: Tensor, out: Tensor) -> None:
        """Copy `rows[positions]` to `out`, in the order of its stream."""
        found = self.table((positions.numel(), *rows.shape[1:]), rows.dtype, rows.device)
        torch.index_select(rows, 0, positions, out=found)
        out.copy_(found, non_blocking=True)

    def bring(self, rows: Tensor, device: torch.device) -> Tensor:
        """Return a copy of `rows` on `device`, in the order of its stream."""
        found = self.table(rows.shape, rows.dtype, rows.device).copy_(rows)
        return found.to(device, non_blocking=True)


class GradientBuffer:
    """Gradients of one history's rows, or of the outputs of a linear layer over it; in plan order.

    Backward takes the chunks in reverse order. A chunk takes the gradients added for its rows, and
    adds gradients for its halo rows. For stale halo rows they come too late and are dropped:

        dH[c] = d from chunk c itself + scale (d from later chunks in the order)

    Scale 1 is the exact gradient with stale rows as constants. Scale 2 compensates for dropped
    gradients: unbiased for each edge over random orders, biased for paths over several chunks.
    Source: GNNPipe (arXiv 2308.10087), technique 3, for a scale of 2.
    `linear_scale` is for layers that compute a weighted sum, the method's `message_scale` for all
    other layers.
    """

    def __init__(self, linear_scale: float, options: HistoryOptions, copies: HostCopies) -> None:
        self._linear_scale, self._copies = linear_scale, copies
        self._message_scale, self._dtype = options.method.message_scale, options.linear_dtype
        self._arriving: list[tuple[Tensor, Tensor, Wait]] = []  # positions, gradients on the way
        self._total: Tensor | None = None
        self._has_any = False
        self._kept: Tensor | None = None  # outputs
        self._done: list[int] = []  # chunks whose output gradients were written

    @property
    def num_bytes(self) -> int:
        return 0 if self._total is None else self._total.nbytes

    def add(self, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        """Add the gradient of halo rows, `[num_halo, *]`; `like` is the history."""
        total = self._sized(grad.dtype, like)
        if total.device == grad.device:
            total.index_add_(0, positions, grad)
            return
        place = self._copies.table(grad.shape, grad.dtype, total.device)
        self._arriving.append((positions, place, self._copies.send(grad, place)))

    def take(self, rows: slice | Tensor, *, is_linear: bool) -> Tensor | None:
        """Return the scaled gradient of `rows`, `[num_taken, *]`; None if none was added."""
        if self._total is None or not self._has_any:
            return None
        for positions, late, wait in self._arriving:
            wait()
            self._total.index_add_(0, positions, late)
        self._arriving.clear()
        grad = self._total[rows]
        scale = self._linear_scale if is_linear else self._message_scale
        return grad if scale == 1.0 else grad * scale

    def add_output(
        self, chunk: Chunk, grad: Tensor, like: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs, `[num_nodes_of_chunk, *]`.

        Returns the buffer, `[num_rows, *]`, and the chunks that hold gradients in it; None for all.
        """
        total = self._sized(self._dtype or grad.dtype, like)
        total[chunk.start : chunk.end] = grad
        if self._kept is None:
            return total, None
        self._done.append(chunk.index)
        return total, tuple(self._done)

    def keep_output(self, chunk: Chunk, rows: Tensor, like: Tensor) -> None:
        """Keep the chunk's outputs in the buffer until their gradient overwrites them."""
        self._kept = self._sized(self._dtype or rows.dtype, like)
        self._kept[chunk.start : chunk.end] = rows

    def kept_output(self, chunk: Chunk) -> Tensor:
        assert self._kept is not None
        return self._kept[chunk.start : chunk.end].clone()

    def end_step(self) -> None:
        self._done.clear()
        self._arriving.clear()
        if self._total is not None and self._has_any:
            self._total.zero_()
            self._has_any = False

    def _sized(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return the buffer, shaped like `like`; a change of dtype clears it."""
        if self._total is None or self._total.dtype != dtype:
            self._arriving.clear()
            self._total = torch.zeros_like(like, dtype=dtype)
        self._has_any = True
        return self._total


FLOOR = 32.0  # unchanged rows assumed in the mean: few rows say little about all


class MeanDrift:
    """Mean drift of one history within a step; `ends` are the end positions of the chunks."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._sums: dict[int, Tensor] = {}  # sum of rows, by chunk
        self.begin_step()

    def begin_step(self) -> None:
        self._moved: Tensor | None = None  # summed change
        self._num_rows: Tensor | int = 0  # that it sums
        self.seen: dict[int, Tensor] = {}  # drift up to and including each chunk, `[*]`

    def replace(self, rows: Tensor) -> None:
        """Start from new rows, `[num_rows, *]`, after all were overwritten."""
        bounds = enumerate(pairwise([0, *self._ends]))
        self._sums = {chunk: _sum(rows[start:end]) for chunk, (start, end) in bounds}

    def move(
        self, chunk: int, rows: Tensor, sum_over_shards: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Add the change of a chunk that has run; `sum_over_shards`: over its ranks, if several."""
        now = _sum(rows)
        then = self._sums[chunk].to(now.device)  # the first sums may be on the host
        self._sums[chunk] = now
        change = (now - then).flatten()
        if sum_over_shards is not None:
            both = sum_over_shards(torch.cat([change, change.new_full((1,), rows.size(0))]))
            change = both[:-1]
        self._moved = change if self._moved is None else self._moved + change
        self._num_rows = self._num_rows + (rows.size(0) if sum_over_shards is None else both[-1])
        self.seen[chunk] = (self._moved / (self._num_rows + FLOOR)).view_as(now)


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
