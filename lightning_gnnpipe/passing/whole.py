"""Functions of the graph's edges alone: computed once on the whole graph, then cut by chunk.

Degrees, Laplacians and the like look at all edges of a node, and those of a halo node lie in other
chunks. What they are computed from does not change from step to step, so neither do they.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gnnpipe.types import ChunkView

Compute = Callable[[], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class _Known:
    """A function's result on the whole graph, its edges sorted by target, and the parts of it."""

    source: Tensor | None
    edges: Tensor
    values: Tensor
    parts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class EdgeFunctions:
    """Remembers what functions of the edges gave on one graph.

    Args:
        num_nodes: Nodes of the graph, N.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._known: dict[Hashable, _Known] = {}

    def part(
        self, key: Hashable, source: Tensor | None, chunk: ChunkView, compute: Compute
    ) -> tuple[Tensor, Tensor]:
        """Return edges that end in `chunk`, `[2, E']` local numbers, and one value for each.

        Args:
            key: Names the function and its options.
            source: The edge weights of the whole graph that it reads, if any; others give a new
                result.
            chunk: The chunk.
            compute: Gives edges between positions, `[2, E'']`, and their values, for the graph.
        """
        known = self._known.get(key)
        if known is None or known.source is not source:
            edges, values = compute()
            target, order = edges[1].sort(stable=True)
            edges = torch.stack([edges[0][order], target])
            known = self._known[key] = _Known(source, edges, values[order])
        place = -1 if chunk.num_nodes == self._num_nodes else chunk.index
        if place not in known.parts:
            known.parts[place] = _cut(known, chunk)
        return known.parts[place]


def _cut(known: _Known, chunk: ChunkView) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([chunk.start, chunk.end], device=known.edges.device)
    first, last = torch.searchsorted(known.edges[1].contiguous(), bounds).tolist()
    source, target = known.edges[:, first:last]
    is_own = (source >= chunk.start) & (source < chunk.end)
    in_halo = torch.searchsorted(chunk.halo, source) + chunk.num_nodes
    local = torch.where(is_own, source - chunk.start, in_halo)
    return torch.stack([local, target - chunk.start]), known.values[first:last]
