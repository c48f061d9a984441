"""Runs a layer on chunks of a small graph, so that no embedding is stale and autograd is exact.

What a chunk reads of another are the live tensors of a run on the whole graph, which comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_gnnpipe._compat_torch import NO_CHECKPOINT, DispatchMode
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import ChunkPlan
from lightning_gnnpipe.passing import (
    ROWS,
    BoundHalo,
    CallKey,
    LinearRule,
    MessageContext,
    replace_attributes,
)
from lightning_gnnpipe.staleness import HistoryStore


class LiveContext(MessageContext):
    """Layers on chunks with halo rows and statistics of the whole graph."""

    def __init__(self, plan: ChunkPlan) -> None:
        super().__init__(HistoryStore(plan.num_nodes, plan.num_chunks), plan)
        self.live, self.exchange = {}, self._append
        self._rows: dict[CallKey, Tensor] = {}  # of the whole graph

    def _append(self, rows: Tensor, bound: BoundHalo, is_replay: bool | None) -> Tensor:
        """Return a chunk's rows with the halo rows appended; keep the whole graph's rows."""
        key = bound.key
        if self.is_whole:
            self._rows[key] = rows.clone()
            return rows.view_as(rows)
        if key not in self._rows:
            raise UnsupportedError(
                expected="a layer to pass messages equally often on each chunk",
                found="one that passes more on some chunks",
                remedy="Call message passing whatever the values of nodes are.",
            )
        return torch.cat([rows, self._rows[key][bound.chunk.halo]])

    def weighted_sum(
        self, layer: str, call: int, rule: LinearRule, edges: Any, rows: Any, weight: Tensor | None
    ) -> Tensor | None:
        if not self.is_whole:
            return None
        if isinstance(rows, Tensor):
            self._rows[CallKey(self.segment, layer, call, ROWS)] = rows.clone()
        return super().weighted_sum(layer, call, rule, edges, rows, weight)


@contextmanager
def deterministic() -> Iterator[None]:
    """Run without random numbers, and without kernels that draw some themselves."""
    with (
        NoRandomness(),  # type: ignore[no-untyped-call]
        replace_attributes(*NO_CHECKPOINT),  # `autograd.grad` does not go through one
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield


class NoRandomness(DispatchMode):  # type: ignore[no-untyped-call]
    """Makes random numbers constants, not 0, and dropout the identity in forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or name.startswith("_"):
            return func(*args, **kwargs)
        if "generator" in kwargs:  # the user's own, which goes on where it was
            kwargs["generator"] = None
        if "rrelu" in name:  # the second argument receives the slopes, for backward
            args[1].copy_(torch.where(args[0] > 0, 1.0, 0.25))
            return args[0].mul_(args[1]) if name.endswith("_") else args[0] * args[1]
        result = func(*args, **kwargs)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(result[1])
        keeps = name.startswith("bernoulli") and len(args) > 1 and isinstance(args[1], float)
        return result.fill_(args[1] if keeps else 0.5)
