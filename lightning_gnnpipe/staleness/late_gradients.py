"""The gradients that chunks have for each other's rows: one buffer a history.

In backward, chunks run in reverse order. A chunk takes what is there for its rows and adds what it
has for others': what it adds for rows that it read fresh is taken later in the same step; what it
adds for stale rows comes too late, and is dropped. With d of fresh rows of other chunks:

    dH[c] = d from chunk c itself + scale (d from later chunks in the order)

A stale row is a constant then, and with a scale of 1 that is exactly the gradient of what was
computed. A scale of 2 makes up for what is dropped: unbiased for each edge over random orders,
biased for paths over several chunks.

Source: GNNPipe (arXiv 2308.10087), technique 3, for a scale of 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.types import ChunkView

Where = slice | Tensor


class GradientBuffer:
    """The gradients of one history's rows, or those of the outputs of a linear layer over it.

    Rows are in plan order, where the history is. Cleared at the end of each step. Outputs are kept
    where their gradients will come.

    Args:
        linear_scale: Factor on what is taken of other chunks, in layers that make a weighted sum.
        message_scale: The same in layers with messages of another kind.
    """

    def __init__(self, linear_scale: float, message_scale: float) -> None:
        self.linear_scale, self._message_scale = linear_scale, message_scale
        self._total: Tensor | None = None
        self._has_any = False
        self._kept: Tensor | None = None  # outputs
        self._done: list[int] = []  # chunks whose outputs' gradients are there

    def add(self, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        """Add what a chunk has for its halo.

        Args:
            positions: `[num_halo]` of the halo.
            grad: `[num_halo, *]`.
            like: The history, `[num_rows, *]`.
        """
        total = self._sized(grad.dtype, like)
        total.index_add_(0, positions, grad.to(total.device))

    def take(self, rows: Where, *, is_linear: bool) -> Tensor | None:
        """Return what other chunks have for `rows`, scaled, `[num_taken, *]`; None if nothing."""
        if self._total is None or not self._has_any:
            return None
        grad = self._total[rows]
        scale = self.linear_scale if is_linear else self._message_scale
        return grad if scale == 1.0 else grad * scale

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs, `[num_nodes_of_chunk, *]`, as `dtype`.

        Returns:
            `[num_rows, *]`: the gradients of all chunks' outputs that count, and the chunks whose
            rows do; None for all rows.
        """
        total = self._sized(dtype, like)
        total[chunk.start : chunk.end] = grad
        if self._kept is None:
            return total, None
        self._done.append(chunk.index)
        return total, tuple(self._done)

    def keep_output(self, chunk: ChunkView, rows: Tensor, dtype: torch.dtype, like: Tensor) -> None:
        """Keep the chunk's outputs, `[num_nodes_of_chunk, *]`, until their gradient comes."""
        self._kept = self._sized(dtype, like)
        self._kept[chunk.start : chunk.end] = rows

    def kept_output(self, chunk: ChunkView) -> Tensor:
        """Return a copy of them."""
        assert self._kept is not None
        return self._kept[chunk.start : chunk.end].clone()

    def end_step(self) -> None:
        """Forget what has come."""
        self._done.clear()
        if self._total is not None and self._has_any:
            self._total.zero_()
            self._has_any = False

    def _sized(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return the buffer, in the shape of `like`; one of another dtype is begun anew."""
        if self._total is None or self._total.dtype != dtype:
            self._total = torch.zeros_like(like, dtype=dtype)
        self._has_any = True
        return self._total
