"""Aliases, and the letters used in formulas throughout the package.

    N  nodes of the graph          n  a node
    E  edges of the graph
    K  chunks                      c  a chunk
    S  stages                      s  a stage
    L  layers                      l  a layer
    D  channels
    G  graph shards                R  data replicas

A *position* is a node's place in the chunk-contiguous order of a plan: chunk ``c`` holds the
positions ``start .. end - 1``. A *node* is an index in the user's own numbering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from torch import Tensor

CHUNKS_PER_STAGE = 4  # num_chunks="auto"; as in all experiments of GNNPipe (arXiv 2308.10087)

PartitionMethod = Literal["metis", "random", "contiguous"]
Partition = PartitionMethod | Tensor
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
CodecName = Literal["fp32", "bf16", "int8", "int1"]
CodecOption = CodecName | tuple[CodecName, CodecName]  # of rows, and of their gradients
DtypeName = Literal["bfloat16", "float16", "float32", "float64"]
OrderName = Literal["shuffled", "fixed"]
StalenessName = Literal["drift", "constant", "gnnpipe"]
ScheduleName = Literal["fill_drain", "1f1b", "interleaved"]
RepeatOption = bool | Literal["auto"]
ChangingInputs = Literal["exact", "allow"]
CrossChunkEdges = Literal["keep", "drop"]
TrafficKind = Literal[
    "forward",
    "backward",
    "halo",
    "halo_grad",
    "output",
    "input_grad",
    "tied_grad",
    "weight_grad",
    "data_grad",
    "control",
]


def names_codecs(option: object) -> bool:
    """Return whether `option` is a `CodecOption`."""
    names = option if isinstance(option, (tuple, list)) and len(option) == 2 else [option]
    return all(name in get_args(CodecName) for name in names)


class PeerView(Protocol):
    """Rows that a chunk exchanges with another shard; see `graph.Peer`."""

    @property
    def shard(self) -> int: ...
    @property
    def send(self) -> Tensor: ...
    @property
    def receive(self) -> Tensor: ...


class ChunkView(Protocol):
    """The part of a chunk that message passing and histories need; see `graph.Chunk`."""

    @property
    def index(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def halo(self) -> Tensor: ...
    @property
    def halo_chunks(self) -> tuple[int, ...]: ...
    @property
    def halo_counts(self) -> tuple[int, ...]: ...
    @property
    def edge_start(self) -> int: ...
    @property
    def edge_end(self) -> int: ...
    @property
    def edge_index(self) -> Tensor: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_halo(self) -> int: ...
    @property
    def peers(self) -> Sequence[PeerView]: ...
    @property
    def is_whole(self) -> bool: ...


class PlanView(Protocol):
    """The part of a plan that message passing needs; see `graph.ChunkPlan`."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def globe(self) -> PlanView: ...
    @property
    def first_slot(self) -> int: ...
    @property
    def perm(self) -> Tensor: ...
    @property
    def edge_perm(self) -> Tensor: ...
    @property
    def chunks(self) -> Sequence[ChunkView]: ...
    @property
    def whole(self) -> PlanView: ...
    @property
    def reverse(self) -> PlanView: ...
    @property
    def num_edge_sets(self) -> int: ...
    @property
    def between_chunks(self) -> PlanView: ...
    def edge_set(self, number: int) -> PlanView: ...
    def chunk_of_row(self) -> Tensor: ...
    def localize(self, edges: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]: ...
