"""Assigns nodes to chunks and shards; one rank computes, the rest receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_gnnpipe.calls import Inputs
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.graph import check_num_chunks, edges_within, partition_nodes, split_chunks
from lightning_gnnpipe.types import CHUNKS_PER_STAGE, CrossChunkEdges, Partition


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """How a graph is cut.

    Attributes:
        partition: A method, or the chunk of each node, `[num_nodes]`.
        auto_chunks: K for "auto", unless the partition or the number of nodes sets it.
        cross_edges: Whether training keeps or drops edges between chunks.
    """

    num_chunks: int | Literal["auto"]
    partition: Partition
    seed: int
    auto_chunks: int = CHUNKS_PER_STAGE
    cross_edges: CrossChunkEdges = "keep"

    @property
    def expected(self) -> int:
        """K as far as it is known before the graph."""
        if isinstance(self.partition, Tensor):
            return int(self.partition.max()) + 1 if self.partition.numel() else 1
        return self.auto_chunks if self.num_chunks == "auto" else self.num_chunks


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
                explain(
                    expected=f"'partition' to name {options.num_chunks} chunks, as 'num_chunks' "
                    "says",
                    found=f"{found}",
                    remedy="Leave num_chunks at 'auto' when you give a partition.",
                )
            )
        return options.num_chunks
