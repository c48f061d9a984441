"""What an intercepted layer knows while it runs: its chunk, and where other chunks' rows are.

In goes a tensor with one row for each node of the chunk; out comes the same tensor widened by the
chunk's halo rows. The context keys every such read by (segment, layer, call, argument), so that a
layer that passes messages several times in one forward pass has a history for each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing.pushpull import PushPull
from lightning_gnnpipe.types import ChunkView

NormCache = dict[tuple[object, ...], tuple[Tensor, ...]]


class CallKey(NamedTuple):
    """Names one history: the `call`-th time that `layer` in `segment` widens `argument`."""

    segment: int
    layer: str
    call: int
    argument: str


class HaloStore(Protocol):
    """Where rows are pushed to and halo rows are pulled from."""

    def push(self, key: CallKey, chunk: ChunkView, rows: Tensor) -> None:
        """Write the chunk's rows, `[num_nodes_of_chunk, *]`."""

    def pull(self, key: CallKey, chunk: ChunkView, out: Tensor) -> None:
        """Read the chunk's halo rows into `out`, `[num_halo, *]`."""

    def push_grad(self, key: CallKey, chunk: ChunkView, grad: Tensor) -> None:
        """Add the gradient of the chunk's halo rows, `[num_halo, *]`."""

    def pull_grad(self, key: CallKey, chunk: ChunkView) -> Tensor | None:
        """Return what other chunks have added for the chunk's rows, or None if nobody has."""


@dataclass(slots=True)
class _Scope:
    """One segment's run over one chunk."""

    chunk: ChunkView
    segment: int
    calls: dict[str, int]
    widened: dict[tuple[int, int], tuple[Tensor, Tensor]]


class MessageContext:
    """The chunk and the segment that are running now, and the store behind them.

    Args:
        store: Histories, or None where the whole graph is one chunk and nothing is to be remembered
            (inference).
        whole: The whole graph as one chunk; global normalisation is computed on it.
        norm_cache: Normalised edges of other contexts over the same chunks, to share.
    """

    def __init__(
        self, store: HaloStore | None, whole: ChunkView, norm_cache: NormCache | None = None
    ) -> None:
        self.store = store
        self.whole = whole
        self.norm_cache: NormCache = {} if norm_cache is None else norm_cache
        self.is_passing = False  # inside of `propagate` or `edge_updater`
        self._scope: _Scope | None = None

    def enter(self, chunk: ChunkView, segment: int) -> None:
        """Say that `segment` runs over `chunk` from now on."""
        self._scope = _Scope(chunk, segment, {}, {})

    def leave(self) -> None:
        """Forget the running chunk and the tensors it widened."""
        self._scope = None

    @property
    def chunk(self) -> ChunkView:
        """The chunk that is running."""
        return self._running.chunk

    @property
    def _running(self) -> _Scope:
        assert self._scope is not None, "a layer ran outside of the pipeline"
        return self._scope

    def next_call(self, layer: str) -> int:
        """Number the calls of `layer` within the running segment and chunk, from 0."""
        call = self._running.calls.get(layer, 0)
        self._running.calls[layer] = call + 1
        return call

    def widen(self, layer: str, call: int, argument: str, rows: Tensor) -> Tensor:
        """Return `[num_nodes + num_halo, *]`: the chunk's rows, then its halo rows.

        A tensor that is widened twice in one segment (attention weights, then messages) is widened
        once.

        Raises:
            UnsupportedError: If `rows` does not have one row a node of the chunk.
        """
        scope = self._running
        memo = (id(rows), 0 if rows.is_inference() else rows._version)
        if memo in scope.widened:
            return scope.widened[memo][1]
        if rows.dim() == 0 or rows.size(0) != scope.chunk.num_nodes:
            raise UnsupportedError(
                explain(
                    expected=f"argument '{argument}' of layer '{layer}' to have one row a node in "
                    "dimension 0",
                    found=f"shape {list(rows.shape)} for {scope.chunk.num_nodes} nodes",
                    remedy="Bipartite inputs and static graphs with a batch dimension are not "
                    "pipelined.",
                )
            )
        if self.store is None:
            wide = rows
        else:
            key = CallKey(scope.segment, layer, call, argument)
            wide = cast(Any, PushPull).apply(rows, self.store, key, scope.chunk)
        scope.widened[memo] = (rows, wide)
        return wide

    def widen_constant(self, per_position: Tensor) -> Tensor:
        """Return the rows of the chunk's nodes, then those of its halo.

        Args:
            per_position: `[num_nodes_of_graph, *]`.
        """
        chunk = self.chunk
        return torch.cat([per_position[chunk.start : chunk.end], per_position[chunk.halo]])
