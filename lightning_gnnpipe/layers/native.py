"""Layers on a micro-batch of whole graphs: PyG's own code, except for BatchNorm.

Source: DeferredBatchNorm of torchgpipe (arXiv 2004.09910).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers.statistics import (
    tracks_statistics,
    update_running,
    uses_batch_statistics,
)
from lightning_gnnpipe.passing import Replacement


class NativeContext:
    """The running segment of one of `num_chunks` micro-batches."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.is_replay: bool | None = None  # see `MessageContext`
        self.leaves: Any = None  # set during a pass, not used by layers
        self.masks = None  # none are drawn ahead
        self._segment = 0
        self._calls = Counter[str]()

    def enter(self, chunk: Any, segment: int, leaves: Mapping[str, Any] | None = None) -> None:
        self._segment = segment
        self._calls.clear()

    def leave(self) -> None:
        self._calls.clear()

    def next_key(self, layer: str) -> tuple[int, str, int]:
        """Return the key of the next call of `layer` in the running segment."""
        self._calls[layer] += 1
        return self._segment, layer, self._calls[layer]


def deferred(norms: Mapping[str, nn.Module], context: NativeContext) -> Iterator[Replacement]:
    """Yield replacements that update running statistics of `norms` once for all micro-batches.

    Each micro-batch is still normalised by its own statistics.
    """
    if context.num_chunks > 1:
        for name, norm in norms.items():
            yield norm, {"forward": _defer(name, norm, context)}


def _defer(name: str, norm: Any, context: NativeContext) -> Callable[[Tensor], Tensor]:
    original, sums = norm.forward, dict[tuple[int, str, int], list[Tensor | None]]()

    def run(x: Tensor) -> Tensor:
        if not uses_batch_statistics(norm):
            return original(x)
        if x.numel() == x.size(1):
            raise UnsupportedError(
                expected=f"'{name}', a {type(norm).__name__}, to get at least two rows from "
                "each micro-batch",
                found="one",
                remedy="Train with a smaller num_chunks, or larger batches (drop_last=True).",
            )
        key = context.next_key(name)
        if tracks_statistics(norm) and not context.is_replay:
            parts = sums.setdefault(key, [])
            parts.append(_moments(x.detach()) if x.numel() else None)  # of graphs without edges
            if len(parts) == context.num_chunks:
                found = [one for one in sums.pop(key) if one is not None]
                if found:
                    update_running(norm, *_pooled(torch.stack(found)))
        return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)

    return run


def _moments(x: Tensor) -> Tensor:
    """Return count, sum, and sum of squared deviations, `[3, channels]`, in float64."""
    rows = x.double().movedim(1, -1).flatten(0, -2)
    count, total = rows.new_full((rows.size(1),), rows.size(0)), rows.sum(0)
    return torch.stack([count, total, (rows - total / count).square().sum(0)])


def _pooled(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pool `moments`, `[num_chunks, 3, channels]`: mean, biased variance and count of rows."""
    count, total, spread = moments.unbind(1)
    num_rows = count.sum(0)
    mean = total.sum(0) / num_rows
    between = (count * (total / count - mean).square()).sum(0)
    return mean, (spread.sum(0) + between) / num_rows, num_rows
