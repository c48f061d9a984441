"""Parameters and buffers with a row a node or edge become leaves of a call, as its arguments are.

    self.emb = nn.Embedding(num_nodes, 64)              and forward reads self.emb.weight
    self.register_buffer("edge_index", edge_index)      and forward reads self.edge_index

As leaves they are cut by chunk; such a parameter stays a weight of the stages that read it. Other
parameters and buffers are no leaves; each stage reads them whole.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, EdgeSets, count_nodes, find_edge_sets
from lightning_gnnpipe.errors import GNNPipeError
from lightning_gnnpipe.stages.find import owners_of

_MOST = 32  # forms of calls to remember


class HeldTensors:
    """Adds the tensors of `module` with a row a node or edge to each call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Hashable, tuple[tuple[str, ...], int]] = {}
        self.left_out: Container[Tensor] = ()  # weights that not every rank holds

    def attach(self, call: Call) -> Call:
        """Return the call with these tensors as more leaves."""
        key = call.signature, tuple([leaf.shape for leaf in call.leaves])
        if key not in self._known:
            if len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = self._find(call)
        names, num_nodes = self._known[key]
        if not names:
            return call
        return call.with_held({n: attrgetter(n)(self._module) for n in names}, num_nodes)

    def _find(self, call: Call) -> tuple[tuple[str, ...], int]:
        """Return the names of the tensors to add, and the number of nodes."""
        tensors = dict(self._tensors())
        edges = {name: one for name, one in tensors.items() if _is_edges(name, one)}
        rows = {name: one.size(0) for name, one in tensors.items() if name not in edges}
        if not tensors:
            return (), 0
        with_edges = call.with_held(edges, call.num_nodes)
        sets = find_edge_sets(with_edges, needs_edges=False)
        try:
            num_nodes = count_nodes(with_edges, sets)
        except GNNPipeError:  # no argument shows it
            ends = [with_edges.leaves[slot] for slot in sets.slots]
            lowest = 1 + max((int(one.max()) for one in ends if one.numel()), default=-1)
            likely = (size for size in rows.values() if size >= lowest and size not in sets.sizes)
            num_nodes = next(likely, -1)
        own = [n for n, size in rows.items() if size == num_nodes or _has_edges(n, size, sets)]
        return (*edges, *own), num_nodes

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that code of forward itself may read."""
        for prefix, owner in owners_of(self._module):
            named = (owner.named_parameters(recurse=False), owner.named_buffers(recurse=False))
            for name, one in chain(*named):
                if one.dim() and one.layout is torch.strided and one not in self.left_out:
                    yield f"{prefix}.{name}".removeprefix("."), one


def _has_edges(name: str, size: int, sets: EdgeSets) -> bool:
    """Whether a tensor of `size` rows belongs to one edge set, and it is clear to which one."""
    try:
        return sets.owner(name, size) >= 0
    except GNNPipeError:
        return False


def _is_edges(name: str, value: Tensor) -> bool:
    is_index = value.dtype in (torch.int64, torch.int32) and value.dim() == 2
    return is_index and value.size(0) == 2 and "edge_index" in name
