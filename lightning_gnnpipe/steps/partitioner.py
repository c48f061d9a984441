"""Options of the engine, and the assignment of nodes to chunks and shards that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_gnnpipe.calls import Inputs
from lightning_gnnpipe.chunks import StepCosts
from lightning_gnnpipe.codecs import MessageOptions
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import check_num_chunks, edges_within, partition_nodes, split_chunks
from lightning_gnnpipe.stages import Layers, check_counts, check_num_stages, solve_balance
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.types import (
    CHUNKS_PER_STAGE,
    Balance,
    CrossChunkEdges,
    OrderName,
    Partition,
    RepeatOption,
    ScheduleName,
)

_EXACT = MessageOptions()

Measure = Callable[[Layers], StepCosts]  # measures the layers of a new module


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


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine, fixed for a run.

    Attributes:
        seed: Of chunk orders and of random numbers in layers; equal on all ranks.
        repeat_encoder: Whether stages recompute cheap values instead of receiving them.
        num_virtual: Stages of each rank, if there are several ranks.
        guards_loss: Whether a jump of the training loss makes the next step exact.
        allows_changes: Whether steps may read histories of other inputs.
    """

    chunks: ChunkOptions
    histories: HistoryOptions
    chunk_order: OrderName
    balance: Balance
    seed: int
    is_fitting: bool
    self_check: bool = True
    messages: MessageOptions = _EXACT
    repeat_encoder: RepeatOption = "auto"
    schedule: ScheduleName = "fill_drain"
    num_virtual: int = 1
    guards_loss: bool = True
    allows_changes: bool = False


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


def count_layers(
    num_layers: int,
    options: EngineOptions,
    num_ranks: int,
    preferred: Sequence[int],
    measured: Callable[[int], tuple[int, ...]],
) -> tuple[int, ...]:
    """Return the number of layers of each stage; `num_ranks`: of the pipeline.

    `preferred` counts are used if they fit. `measured` returns counts by measured costs.
    """
    num_virtual = options.num_virtual if num_ranks > 1 else 1
    num_stages = num_ranks * num_virtual
    check_num_stages(num_layers, num_ranks, num_virtual)
    if not isinstance(options.balance, str):
        return check_counts(options.balance, num_layers, num_stages)
    if options.balance == "measured":
        if (len(preferred), sum(preferred)) == (num_stages, num_layers):
            return tuple(preferred)
        if 1 < num_stages < num_layers:
            return measured(num_stages)
    return solve_balance([1.0] * num_layers, num_stages)
