"""Protocols of the stores and links that message passing uses, and their keys and tapes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_gnnpipe.graph import Chunk
from lightning_gnnpipe.staleness import RowMoments


class CallKey(NamedTuple):
    """Key of one history: the `call`-th time that `layer` in `segment` widens `argument`."""

    segment: int
    layer: str
    call: int
    argument: str


class Tape:
    """Halo reads of some layers over one chunk: recorded in forward, replayed in backward."""

    def __init__(self) -> None:
        self.is_replay = False
        self.stale: dict[Hashable, Collection[int]] = {}  # stale chunks of each read


class MomentSource(Protocol):
    """Statistics of norms over the whole graph, by call."""

    def __getitem__(self, key: CallKey) -> RowMoments:
        """Return the statistics of one call."""

    def keep(
        self, key: CallKey, rows: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store the statistics of the whole graph's rows; return mean, variance and count."""


class ShardLink(Protocol):
    """Connection to the ranks that hold the other shards of each chunk."""

    def ghosts(self, chunk: Chunk) -> Tensor:
        """Return the chunk's rows on other ranks, `[num_ghosts]`, ascending."""

    def give_back(self, key: CallKey, chunk: Chunk, grad: Tensor) -> Tensor:
        """Send gradients of `ghosts` to their ranks; return the received ones, `[num_nodes, *]`."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks of the stage; collective."""


class HaloStore(Protocol):
    """Store to which chunks push rows, and from which they pull halo rows."""

    @property
    def is_local(self) -> bool:
        """Whether histories are on the layers' device, so that they can be read in place."""

    @property
    def moments(self) -> MomentSource:
        """The statistics of norms."""

    @property
    def by_chunk(self) -> HaloStore:
        """The store for histories with one row per chunk instead of one per node."""

    @property
    def shards(self) -> ShardLink | None:
        """The link to other shards; None without graph parallelism."""

    @property
    def linear_scale(self) -> float:
        """The factor on gradients between chunks, in weighted sums of rows."""

    def push(self, key: CallKey, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        """Write the chunk's rows, `[num_nodes, *]`; `keeps_old` saves the previous rows."""

    def drift(self, key: CallKey, chunk: Chunk) -> tuple[tuple[int, ...], Tensor] | None:
        """Return the chunks read stale and the drift, `[*]`, to add to their rows, or None."""

    def pull(self, key: CallKey, chunk: Chunk, out: Tensor) -> Collection[int]:
        """Read the halo rows into `out`, `[num_halo, *]`; return the stale chunks."""

    def pull_again(self, key: CallKey, chunk: Chunk, out: Tensor, stale: Collection[int]) -> None:
        """Repeat the `pull` that returned `stale`, after later chunks have pushed."""

    def push_grad(self, key: CallKey, chunk: Chunk, grad: Tensor) -> None:
        """Add the gradient of the chunk's halo rows, `[num_halo, *]`."""

    def pull_grad(self, key: CallKey, chunk: Chunk, *, is_linear: bool) -> Tensor | None:
        """Return the scaled gradient that other chunks added for the chunk's rows, or None."""

    def read(self, key: CallKey, chunk: Chunk) -> Tensor:
        """Return the whole history, `[num_rows, *]`, which holds the chunk's sources."""

    def keep_output(self, key: CallKey, chunk: Chunk, rows: Tensor) -> None:
        """Keep the chunk's outputs, `[num_nodes, *]`, until `add_output_grad`."""

    def kept_output(self, key: CallKey, chunk: Chunk) -> Tensor:
        """Return a copy of the outputs that `keep_output` stored."""

    def add_output_grad(
        self, key: CallKey, chunk: Chunk, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Write the gradient of the chunk's outputs; return the gradients of all, `[num_rows, *]`.

        Also return the chunks whose rows are valid. None means all: missing gradients are zero.
        """


class EdgeLeaves(Protocol):
    """The edge-level tensors of the batch that need no gradient."""

    def whole_edge_leaf(self, name: str, *, edge_set: int | None) -> Tensor | None:
        """Return leaf `name` in the edge order of the plan.

        None if the leaf belongs to another edge set, or needs a gradient.
        """
