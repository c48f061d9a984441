"""What becomes of the gradients that chunks have for each other's rows.

A rule says it, a buffer does it: one buffer a history. In backward, chunks run in reverse order. A
chunk takes what is there for its rows and adds what it has for others': what it adds for rows that
it read fresh is taken later in the same step; what it adds for stale rows comes too late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history.saved import SavedGradients
from lightning_gnnpipe.types import ChunkView

Where = slice | Tensor


class GradientBuffer(ABC):
    """The gradients of one history's rows, or those of the outputs of a linear layer over it.

    Rows are in plan order, where the history is.

    Args:
        scale: Factor on what is taken of other chunks; a buffer may change it between steps.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._kept: Tensor | None = None  # outputs

    @abstractmethod
    def add(self, chunk: ChunkView, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        """Add what `chunk` has for its halo.

        Args:
            chunk: The reader.
            positions: `[num_halo]` of its halo.
            grad: `[num_halo, *]`.
            like: The history, `[num_rows, *]`.
        """

    def take(self, rows: Where, like: Tensor) -> Tensor | None:
        """Return what other chunks have for `rows`, scaled, `[num_taken, *]`; None if nothing."""
        grad = self._take(rows, like)
        return grad if grad is None or self.scale == 1.0 else grad * self.scale

    @abstractmethod
    def _take(self, rows: Where, like: Tensor) -> Tensor | None:
        """Return it unscaled."""

    @abstractmethod
    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs, `[num_nodes_of_chunk, *]`, as `dtype`.

        Returns:
            `[num_rows, *]`: the gradients of all chunks' outputs that count, and the chunks whose
            rows do; None for all rows.
        """

    def keep_output(self, chunk: ChunkView, rows: Tensor, dtype: torch.dtype, like: Tensor) -> None:
        """Keep the chunk's outputs, `[num_nodes_of_chunk, *]`, until their gradient comes."""
        self._kept = sized(self._kept, dtype, like)
        self._kept[chunk.start : chunk.end] = rows

    def kept_output(self, chunk: ChunkView) -> Tensor:
        """Return a copy of them."""
        assert self._kept is not None
        return self._kept[chunk.start : chunk.end].clone()

    @abstractmethod
    def end_step(self, *, is_exact: bool) -> None:
        """Forget what the next step does not need; an exact step has left nothing for it."""

    @abstractmethod
    def follow_rate(self, share: float) -> None:
        """Go on with the factors for such a share of the largest learning rate, from 0 to 1."""

    @abstractmethod
    def rescale(self, factor: float | None) -> None:
        """Multiply what waits for the next step; None: drop it."""

    def save(self) -> SavedGradients | None:
        """Return what waits for the next step; nothing is copied."""
        return None

    @abstractmethod
    def load(self, saved: SavedGradients) -> None:
        """Go on with what was saved."""


class GradientRule(ABC):
    """What becomes of the gradients of rows that were read stale."""

    @property
    def scale(self) -> float:
        """Factor on the gradients of fresh rows of other chunks, at first."""
        return 1.0

    @property
    def scales(self) -> tuple[float, ...]:
        """The factors that there may be."""
        return (self.scale,)

    @property
    def biases(self) -> tuple[float, ...]:
        """Those by which some edges count more than others."""
        return tuple(scale for scale in self.scales if scale != 1.0)

    def num_tables(self, *, recomputes: bool) -> int:
        """Return how many tables of the size of a linear layer's outputs its buffer is made of."""
        return 1

    @property
    def keeps_halos(self) -> bool:
        """Whether its buffer keeps the gradients of each chunk's halo until the next step."""
        return False

    @abstractmethod
    def make_buffer(self) -> GradientBuffer:
        """Return an empty buffer."""


@dataclass(frozen=True)
class DroppedGradients(GradientRule):
    """A stale row is a constant: its gradient is dropped.

    With d of fresh rows of other chunks, and scale s:

        dH[c] = d from chunk c itself + s (d from later chunks in the order)

    With s = 1 that is exactly the gradient of what was computed. s = 2 makes up for what is
    dropped: unbiased for each edge over random orders, biased for paths over several chunks.

    Source: GNNPipe (arXiv 2308.10087), technique 3, for `scale=2`.

    Args:
        scale: s, at least 0.

    Raises:
        ConfigError: If it is negative.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale >= 0:
            raise ConfigError(
                explain(
                    expected="'scale' of DroppedGradients to be at least 0",
                    found=str(self.scale),
                    remedy="1 is the exact gradient of the stale function, 2 the paper's.",
                )
            )

    def make_buffer(self) -> GradientBuffer:
        return ClearedBuffer(self.scale)


class ClearedBuffer(GradientBuffer):
    """Cleared at the end of each step. Outputs are kept where their gradients will come."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self._total: Tensor | None = None
        self._has_any = False
        self._keeps_outputs = False
        self._done: list[int] = []  # chunks whose outputs' gradients are there

    def add(self, chunk: ChunkView, positions: Tensor, grad: Tensor, like: Tensor) -> None:
        total = self._sized(grad.dtype, like)
        total.index_add_(0, positions, grad.to(total.device))

    def _take(self, rows: Where, like: Tensor) -> Tensor | None:
        return self._total[rows] if self._total is not None and self._has_any else None

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        total = self._sized(dtype, like)
        total[chunk.start : chunk.end] = grad
        if not self._keeps_outputs:
            return total, None
        self._done.append(chunk.index)
        return total, tuple(self._done)

    def keep_output(self, chunk: ChunkView, rows: Tensor, dtype: torch.dtype, like: Tensor) -> None:
        self._keeps_outputs = True
        self._kept = self._sized(dtype, like)
        self._kept[chunk.start : chunk.end] = rows

    def end_step(self, *, is_exact: bool) -> None:
        self._done.clear()
        if self._total is not None and self._has_any:
            self._total.zero_()
            self._has_any = False

    def follow_rate(self, share: float) -> None:
        """Nothing is damped by it."""

    def rescale(self, factor: float | None) -> None:
        """Nothing waits."""

    def load(self, saved: SavedGradients) -> None:
        """Drop it: it is of a run with another method."""

    def _sized(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        self._total = sized(self._total, dtype, like)
        self._has_any = True
        return self._total


def sized(buffer: Tensor | None, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return `buffer`, or zeros in the shape of `like` if it is none or has another dtype."""
    if buffer is None or buffer.dtype != dtype:
        return torch.zeros_like(like, dtype=dtype)
    return buffer
