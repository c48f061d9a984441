"""What an intercepted layer knows while it runs: its chunk, and where other chunks' rows are.

In goes a tensor with one row for each node of the chunk; out comes the same tensor widened by the
chunk's halo rows. The context keys every such read by (segment, layer, call, argument), so that a
layer that passes messages several times in one forward pass has a history for each time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing.aggregate import Aggregation
from lightning_gnnpipe.passing.interfaces import CallKey, HaloStore
from lightning_gnnpipe.passing.pushpull import push_pull
from lightning_gnnpipe.passing.running import RunningChunk, Tape
from lightning_gnnpipe.passing.whole import EdgeFunctions
from lightning_gnnpipe.types import PlanView


class MessageContext(RunningChunk):
    """The chunk and the segment that are running now, and the store behind them.

    Args:
        store: Histories, or None where nothing is to be remembered: the whole graph is one chunk
            (inference), or no edge joins two chunks.
        plan: The graph's chunks.
        functions: Normalised edges and the like of other contexts over the same chunks, to share.
    """

    def __init__(
        self, store: HaloStore | None, plan: PlanView, functions: EdgeFunctions | None = None
    ) -> None:
        super().__init__(plan)
        self.store = store
        self.functions = EdgeFunctions(plan) if functions is None else functions
        self.tape: Tape | None = None  # while activations may be computed again in backward
        self.dtypes: dict[Hashable, torch.dtype] = {}  # of norms' results on the whole graph
        self.replaced: Collection[str] = ()  # norms whose running statistics are replaced
        self.is_refresh = False  # an exact pass for the histories alone
        self.is_passing = False  # inside of `propagate` or `edge_updater`

    @contextmanager
    def taped(self, tape: Tape) -> Iterator[None]:
        """Record what layers read of other chunks within the block, or play it back."""
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None

    @property
    def is_replay(self) -> bool:
        """Whether activations are computed a second time, for backward."""
        return self.tape is not None and self.tape.is_replay

    @property
    def is_plain(self) -> bool:
        """Whether the whole graph is one chunk, and nothing is remembered."""
        return self.store is None and self.is_whole

    def next_key(self, layer: str) -> CallKey:
        """Name the next call of a layer with statistics over all nodes."""
        call = self.next_call(f"statistics of {layer}")
        return CallKey(self._running.segment, layer, call, "statistics")

    def aggregation(
        self, key: tuple[str, int, str], edges: Tensor, weight: Tensor | None, *, is_mean: bool
    ) -> Aggregation | None:
        """Return how to aggregate over `edges` without copies of the halo.

        Args:
            key: (layer, call, argument).
            edges: `[2, num_edges]` as given to `propagate`.
            weight: Their factors, `[num_edges]`, or None for ones.
            is_mean: Whether sums are divided by the number of messages.

        Returns:
            None unless edges and weights are the batch's own, or a function of them, and the
            history can be read in place.
        """
        scope = self._running
        if self.store is not None and not self.store.is_local and not self.is_whole:
            return None
        adjacency = self.functions.adjacency(edges, weight, is_mean=is_mean)
        if adjacency is None and edges is scope.chunk.edge_index:
            leaf = None if weight is None else self.whole_leaf(weight)
            if weight is None or (leaf is not None and leaf.dim() == 1):
                name = None if weight is None else self.leaf_name(weight)
                adjacency = self.functions.batch_adjacency(
                    (name, self.edges_key), self.whole.edge_index, leaf, is_mean=is_mean
                )
        if adjacency is None:
            return None
        full_key = CallKey(scope.segment, *key)
        return Aggregation(adjacency, scope.chunk, self.store, full_key, self.is_whole, self.tape)

    def widen(
        self,
        layer: str,
        call: int,
        argument: str,
        rows: Tensor,
        dim: int = 0,
        *,
        is_linear: bool = False,
    ) -> Tensor:
        """Return `rows` with the halo's behind the chunk's in dimension `dim`.

        A tensor that is widened twice in one segment (attention weights, then messages) is widened
        once. With `is_linear` the layer makes a weighted sum of them.

        Raises:
            UnsupportedError: If `rows` does not have one row a node of the chunk.
        """
        scope = self._running
        memo = (id(rows), version_of(rows), scope.is_reverse)
        if version_of(rows) >= 0 and memo in scope.widened:
            return scope.widened[memo][1]
        if not -rows.dim() <= dim < rows.dim() or rows.size(dim) != scope.chunk.num_nodes:
            raise UnsupportedError(
                explain(
                    expected=f"argument '{argument}' of layer '{layer}' to have one row a node in "
                    f"dimension {dim}",
                    found=f"shape {list(rows.shape)} for {scope.chunk.num_nodes} nodes",
                    remedy="Bipartite inputs and static graphs with a batch dimension are not "
                    "pipelined.",
                )
            )
        if self.store is None:
            wide = rows
        else:
            key = CallKey(scope.segment, layer, call, argument)
            first = rows.movedim(dim, 0)
            wide = push_pull(first, self.store, key, scope.chunk, self.tape, is_linear=is_linear)
            wide = wide.movedim(0, dim)
        scope.widened[memo] = (rows, wide)
        return wide
