"""What message passing asks of the engine and the histories."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_gnnpipe.types import ChunkView


class CallKey(NamedTuple):
    """Names one history: the `call`-th time that `layer` in `segment` widens `argument`."""

    segment: int
    layer: str
    call: int
    argument: str


class RowMoments(Protocol):
    """The statistics of one call of a norm; see `history.RowMoments`."""

    @property
    def center(self) -> Tensor: ...
    @property
    def is_complete(self) -> bool: ...
    def sums_of(self, rows: Tensor) -> Tensor: ...
    def add(self, chunk: int, sums: Tensor) -> Tensor: ...
    def add_grad(self, grad: Tensor) -> Tensor: ...
    def mean_and_var(self, chunk: int, sums: Tensor) -> tuple[Tensor, Tensor]: ...
    def present(self) -> tuple[Tensor, Tensor, Tensor]: ...


class MomentSource(Protocol):
    """Where norms find the statistics of the whole graph."""

    def __getitem__(self, key: CallKey) -> RowMoments:
        """Return those of a call."""

    def keep(
        self, key: CallKey, rows: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the statistics of the whole graph's rows; see `history.MomentStore.keep`."""


class ShardLink(Protocol):
    """The other ranks that hold a part of each chunk."""

    def ghosts(self, chunk: ChunkView) -> Tensor:
        """Return the rows, `[num_ghosts]`, that lie in the chunk and on other ranks; ascending."""

    def give_back(self, key: CallKey, chunk: ChunkView, grad: Tensor) -> Tensor:
        """Send the gradient of `ghosts`, `[num_ghosts, *]`, to where they are.

        Returns:
            `[num_nodes_of_chunk, *]`: what other ranks send for the chunk's own rows.
        """

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks of the stage; a collective call."""


class HaloStore(Protocol):
    """Where rows are pushed to and halo rows are pulled from."""

    @property
    def is_local(self) -> bool:
        """Whether histories are where the layers compute, so that they can be read in place."""

    @property
    def moments(self) -> MomentSource:
        """The statistics of norms."""

    @property
    def by_chunk(self) -> HaloStore:
        """The store for histories with one row a chunk instead of one a node."""

    @property
    def shards(self) -> ShardLink | None:
        """The other ranks that hold a part of each chunk, if there are any."""

    def scale_of(self, key: CallKey) -> float:
        """Return the factor on gradients of the call between chunks."""

    def push(
        self, key: CallKey, chunk: ChunkView, rows: Tensor, *, keeps_old: bool = False
    ) -> None:
        """Write the chunk's rows, `[num_nodes_of_chunk, *]`; keep what was there if asked to."""

    def drift(self, key: CallKey, chunk: ChunkView) -> tuple[tuple[int, ...], Tensor] | None:
        """Return the chunk's sources that are read stale, and how far their rows have moved."""

    def pull(self, key: CallKey, chunk: ChunkView, out: Tensor) -> Collection[int]:
        """Read the chunk's halo rows into `out`, `[num_halo, *]`; return which chunks are stale."""

    def pull_again(
        self, key: CallKey, chunk: ChunkView, out: Tensor, stale: Collection[int]
    ) -> None:
        """Read what `pull` read, after later chunks have pushed; `stale` is what it returned."""

    def push_grad(self, key: CallKey, chunk: ChunkView, grad: Tensor) -> None:
        """Add the gradient of the chunk's halo rows, `[num_halo, *]`."""

    def pull_grad(self, key: CallKey, chunk: ChunkView, *, is_linear: bool) -> Tensor | None:
        """Return what other chunks have added for the chunk's rows, or None if nobody has."""

    def read(self, key: CallKey, chunk: ChunkView) -> Tensor:
        """Return the history, `[num_nodes_of_graph, *]`, for the chunk to read its sources from."""

    def keep_output(self, key: CallKey, chunk: ChunkView, rows: Tensor) -> None:
        """Keep the chunk's outputs, `[num_nodes_of_chunk, *]`, until their gradient comes."""

    def kept_output(self, key: CallKey, chunk: ChunkView) -> Tensor:
        """Return a copy of them."""

    def add_output_grad(
        self, key: CallKey, chunk: ChunkView, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs, `[num_nodes_of_chunk, *]`.

        Returns:
            `[num_nodes_of_graph, *]`: those of all chunks so far, and these chunks; or None for
            them if it is zero elsewhere.
        """


class EdgeLeaves(Protocol):
    """The edge-level tensors of the batch that need no gradient."""

    def whole_edge_leaf(self, name: str, *, edge_set: int | None, reverse: bool) -> Tensor | None:
        """Return leaf `name`, `[num_edges, *]`, in the slots of the plan or of its reverse.

        None if it does not belong to the edges of `edge_set`, or needs a gradient.
        """
