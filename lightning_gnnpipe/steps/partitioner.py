"""Options of the engine, and the assignment of nodes to chunks and shards that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lightning_gnnpipe.calls import Inputs
from lightning_gnnpipe.chunks import StepCosts
from lightning_gnnpipe.codecs import MessageOptions
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import check_num_chunks, edges_within, partition_nodes, split_chunks
from lightning_gnnpipe.stages import Layers
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.types import (
    CHUNKS_PER_STAGE,
    Balance,
    CrossChunkEdges,
    Partition,
    RepeatOption,
)

Measure = Callable[[Layers], StepCosts]  # measures the layers of a new module


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """How a graph is cut."""

    num_chunks: int | Literal["auto"]
    partition: Partition  # a method, or the chunk of each node, `[num_nodes]`
    seed: int
    auto_chunks: int = CHUNKS_PER_STAGE  # unless the partition or the number of nodes sets K
    cross_edges: CrossChunkEdges = "keep"  # in training

    @property
    def expected(self) -> int:
        """K as far as it is known before the graph."""
        if isinstance(self.partition, Tensor):
            return int(self.partition.max()) + 1 if self.partition.numel() else 1
        return self.auto_chunks if self.num_chunks == "auto" else self.num_chunks


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine, fixed for a run."""

    chunks: ChunkOptions
    histories: HistoryOptions
    balance: Balance
    seed: int  # of chunk orders and of random numbers in layers; equal on all ranks
    is_fitting: bool
    self_check: bool = True
    messages: MessageOptions = field(default_factory=MessageOptions)
    repeat_encoder: RepeatOption = "auto"  # recompute cheap values on stages, not receive them


class Partitioner:
    """Cuts graphs into chunks, and chunks into shards."""

    def __init__(self, options: ChunkOptions) -> None:
        self._options = options

    def chunks(self, inputs: Inputs) -> Tensor:
        """Return the chunk of each node, `[num_nodes]`."""
        return partition_nodes(
            inputs.edge_index.cpu(),
            inputs.num_nodes,
            num_chunks=self.num_chunks(inputs),
            method=self._options.partition,
            seed=self._options.seed,
        )

    def shards(self, edge_index: Tensor, assignment: Tensor, num_shards: int) -> Tensor:
        """Split every chunk over all shards; return each node's shard, `[num_nodes]`."""
        return split_chunks(edge_index, assignment, num_shards, seed=self._options.seed)

    def kept_edges(self, edge_index: Tensor, assignment: Tensor) -> Tensor | None:
        """Return the edges that training reads, `[num_kept]`; None for all."""
        if self._options.cross_edges == "keep":
            return None
        kept = edges_within(edge_index, assignment)
        return None if kept.numel() == edge_index.size(1) else kept

    def num_chunks(self, inputs: Inputs) -> int:
        """Return K; raise ConfigError if it is out of range or not the partition's."""
        options, found = self._options, None
        if isinstance(options.partition, Tensor) and options.partition.numel():
            found = int(options.partition.max()) + 1
        if options.num_chunks == "auto":
            return found or min(options.auto_chunks, inputs.num_nodes)
        check_num_chunks(options.num_chunks, inputs.num_nodes)
        if found is not None and found != options.num_chunks:
            raise ConfigError(
                expected=f"'partition' to have {options.num_chunks} chunks, like 'num_chunks'",
                found=f"{found}",
                remedy="Leave num_chunks at 'auto' when you give a partition.",
            )
        return options.num_chunks
