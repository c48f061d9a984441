"""Gradients between chunks: one buffer for each history.

Backward takes the chunks in reverse order. A chunk takes the gradients added for its rows, and adds
gradients for its halo rows. For stale halo rows they come too late and are dropped:

    dH[c] = d from chunk c itself + scale (d from later chunks in the order)

Scale 1 is the exact gradient with stale rows as constants. Scale 2 compensates for dropped
gradients: unbiased for each edge over random orders, biased for paths over several chunks.

Source: GNNPipe (arXiv 2308.10087), technique 3, for a scale of 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.types import ChunkView

Where = slice | Tensor


class GradientBuffer:
    """Gradients of one history's rows, or of the outputs of a linear layer over it; in plan order.

    `linear_scale` is for layers that compute a weighted sum, `message_scale` for all other layers.
    """

    def __init__(self, linear_scale: float, message_scale: float) -> None:
        self.linear_scale, self._message_scale = linear_scale, message_scale
        self._total: Tensor | None = None
        self._has_any = False
        self._kept: Tensor | None = None  # outputs
        self._done: list[int] = []  # chunks whose output gradients were written

    def add(self, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        """Add the gradient of halo rows, `[num_halo, *]`; `like` is the history."""
        total = self._sized(grad.dtype, like)
        total.index_add_(0, positions, grad.to(total.device))

    def take(self, rows: Where, *, is_linear: bool) -> Tensor | None:
        """Return the scaled gradient of `rows`, `[num_taken, *]`; None if none was added."""
        if self._total is None or not self._has_any:
            return None
        grad = self._total[rows]
        scale = self.linear_scale if is_linear else self._message_scale
        return grad if scale == 1.0 else grad * scale

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs, `[num_nodes_of_chunk, *]`.

        Returns the buffer, `[num_rows, *]`, and the chunks that hold gradients in it; None for all.
        """
        total = self._sized(dtype, like)
        total[chunk.start : chunk.end] = grad
        if self._kept is None:
            return total, None
        self._done.append(chunk.index)
        return total, tuple(self._done)

    def keep_output(self, chunk: ChunkView, rows: Tensor, dtype: torch.dtype, like: Tensor) -> None:
        """Keep the chunk's outputs in the buffer until their gradient overwrites them."""
        self._kept = self._sized(dtype, like)
        self._kept[chunk.start : chunk.end] = rows

    def kept_output(self, chunk: ChunkView) -> Tensor:
        assert self._kept is not None
        return self._kept[chunk.start : chunk.end].clone()

    def end_step(self) -> None:
        self._done.clear()
        if self._total is not None and self._has_any:
            self._total.zero_()
            self._has_any = False

    def _sized(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return the buffer, shaped like `like`; a change of dtype clears it."""
        if self._total is None or self._total.dtype != dtype:
            self._total = torch.zeros_like(like, dtype=dtype)
        self._has_any = True
        return self._total
