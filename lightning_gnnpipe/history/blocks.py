"""Gradients that go back layer by layer within blocks of layers, and a step late between them.

    layers      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15        two blocks
    step e      given what the  | given the gradient of
                other found in  | the loss in step e
                step e - 1      |

Within a block every edge between chunks counts once, in the step itself, whether its source was
read fresh or stale. So no gradient is made of late ones but those that enter a block from behind,
and no gradient is older than there are blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history.gradients import ClearedBuffer, GradientBuffer, GradientRule
from lightning_gnnpipe.history.weights import LastWeights
from lightning_gnnpipe.types import ChunkView


@dataclass(frozen=True)
class BlockGradients(GradientRule):
    """Layers are in blocks; all edges count in time within one, a step late between two.

    With g_e[b] the gradient that block b finds in step e for what it was given by block b - 1:

        in block b   every row has the gradient of all its readers of this step, as if they had read
                     it fresh
        b is last    begins with the gradient of the loss
        otherwise    begins with g_(e-1)[b + 1]

    The gradient of block b is B - 1 - b steps late. All stages go back at the same time where each
    has whole blocks; a block that several stages share goes back on one of them after the other. In
    a step with nothing that waits, such as the first after an exact one, so do all blocks. With the
    `lookahead` of `StalenessMethod` a weight is carried forward by so many steps for each step that
    its gradient is late, on average over the layers that it is used in.

    Source: the gradients between blocks are those of DDG (Huo et al., arXiv 1804.10574), which
    converges; within blocks the gradient passes a stale row straight through to the row of this
    step. Putting both together for chunks of a graph is ours.

    Args:
        num_blocks: B, at least 1; as many as there are layers at most. With 1 no gradient is late,
            and stages go back one after the other.

    Raises:
        ConfigError: If it is not a number of blocks.
    """

    num_blocks: int = 2

    def __post_init__(self) -> None:
        is_count = isinstance(self.num_blocks, int) and not isinstance(self.num_blocks, bool)
        if not (is_count and self.num_blocks >= 1):
            raise ConfigError(
                explain(
                    expected="'num_blocks' of BlockGradients to be at least 1",
                    found=str(self.num_blocks),
                    remedy="As many as stages let all of them go back at once.",
                )
            )

    def num_tables(self, *, recomputes: bool) -> int:
        return 1 + recomputes

    def make_buffer(self) -> GradientBuffer:
        return _GatheredBuffer(1.0)


class _GatheredBuffer(ClearedBuffer):
    """What readers have for rows, or the gradients of outputs, of one step; taken once all is in.

    Several gradients of a chunk's outputs are added.
    """

    def add_output(
        self, chunk: ChunkView, grad: Tensor, dtype: torch.dtype, like: Tensor
    ) -> tuple[Tensor, None]:
        total = self._sized(dtype, like)
        total[chunk.start : chunk.end].add_(grad)
        return total, None

    def keep_output(self, chunk: ChunkView, rows: Tensor, dtype: torch.dtype, like: Tensor) -> None:
        """Keep them apart: a layer may be computed again when gradients are in already."""
        GradientBuffer.keep_output(self, chunk, rows, dtype, like)


class LateGradients:
    """What waits for the next step beside histories: what blocks found for what they were given.

    A cut is named by the number of the layer behind it. All tensors are in plan order.

    Attributes:
        weights: Those that the step began with, where weights are carried forward.
    """

    def __init__(self) -> None:
        self.weights = LastWeights()
        self._new: dict[int, dict[str, Tensor]] = {}
        self._last: dict[int, dict[str, Tensor]] = {}

    def take(self, cut: int) -> dict[str, Tensor] | None:
        """Return what the block before `cut` begins with, by value; None if nothing waits."""
        return self._last.get(cut)

    def put(self, cut: int, grads: dict[str, Tensor]) -> None:
        """Keep what the block behind `cut` has found in this step, by value."""
        self._new[cut] = grads

    def end_step(self, *, is_exact: bool) -> None:
        """Have what was put wait; after an exact step nothing does."""
        if is_exact:
            self.drop()
            return
        self._last, self._new = self._new, {}

    def drop(self) -> None:
        """Forget what waits."""
        self._new, self._last = {}, {}
        self.weights.clear()

    def rescale(self, factor: float | None) -> None:
        """Multiply what waits; None: drop it."""
        if factor is None:
            self.drop()
            return
        for grads in self._last.values():
            for grad in grads.values():
                grad.mul_(factor)

    def save(self) -> dict[int, dict[str, Tensor]]:
        """Return what waits, by cut and value; nothing is copied."""
        return self._last

    def load(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go on with what was saved."""
        self.drop()
        for cut, grads in saved.items():
            self._last[cut] = {name: grad.clone() for name, grad in grads.items()}
