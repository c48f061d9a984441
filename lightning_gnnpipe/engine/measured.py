"""What a forecast is made from: a model and a graph, cut and timed, and how training would run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Link, MessageOptions
from lightning_gnnpipe.engine.costs import LayerCost
from lightning_gnnpipe.engine.model import Balance
from lightning_gnnpipe.graph import ChunkPlan, SplitSizes, measure_split
from lightning_gnnpipe.history import HistoryOptions
from lightning_gnnpipe.stages import (
    Kind,
    Layers,
    Stage,
    Value,
    check_counts,
    solve_balance,
    split_layers,
)


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What all layouts have in common.

    Attributes:
        balance: How layers are dealt out to stages.
        histories: How histories are kept, and whether activations are not.
        messages: How ranks send rows to each other.
        link: What messages cost.
        memory_gib: Memory of a rank; None for any.
    """

    balance: Balance
    histories: HistoryOptions
    messages: MessageOptions
    link: Link
    memory_gib: float | None


@dataclass(frozen=True)
class Measured:
    """A model and a graph, cut and timed.

    Attributes:
        module: The pipelined module.
        layers: Its layers.
        costs: What each costs.
        copied_bytes_per_s: See `measure_copies`.
        chunks: The chunks of the graph.
        edge_index: `[2, num_edges]` on the CPU.
        find_shards: Returns `[num_nodes]` the shard of each node, given how many there are.
        batch_bytes: Bytes of the batch.
        loss_s: Seconds that the step goes on for behind the module.
        options: What all layouts have in common.
    """

    module: nn.Module
    layers: Layers
    costs: Sequence[LayerCost]
    copied_bytes_per_s: float
    chunks: ChunkPlan
    edge_index: Tensor
    find_shards: Callable[[int], Tensor]
    batch_bytes: int
    loss_s: float
    options: LayoutOptions

    @property
    def one_device_s(self) -> float:
        """Seconds of a step of the same chunks on one device."""
        return sum(cost.forward_s + cost.backward_s for cost in self.costs) + self.loss_s

    @property
    def messages(self) -> MessageOptions:
        """How rows travel; with one chunk all steps are exact."""
        return self.options.messages if self.chunks.num_chunks > 1 else MessageOptions()

    @cached_property
    def assignment(self) -> Tensor:
        """`[num_nodes]` the chunk of each node."""
        found = torch.empty_like(self.chunks.perm, device="cpu")
        found[self.chunks.perm.cpu()] = self.chunks.chunk_of_position().cpu()
        return found

    def row_bytes(self, names: Sequence[str]) -> int:
        """Return the bytes of a row of all these values."""
        return sum(self.layers.values[name].row_bytes for name in names)

    def num_rows(self, value: Value, chunk: int) -> int:
        """Return the rows that `value` has in a chunk."""
        own = self.chunks.edge_set(value.edge_set).chunks[chunk]
        return own.num_nodes if value.kind is Kind.NODE else own.num_edges

    def split(self, num_shards: int) -> SplitSizes:
        """Return the sizes of the pieces over so many shards, as training would split them."""
        is_split = num_shards > 1
        shards = self.find_shards(num_shards) if is_split else torch.zeros_like(self.assignment)
        return measure_split(self.edge_index, self.assignment, shards, num_shards)

    def cut(self, num_stages: int) -> tuple[Stage, ...]:
        """Return the stages, as training would deal layers out to them."""
        balance = self.options.balance
        if not isinstance(balance, str) and len(balance) == num_stages:
            return split_layers(self.layers, check_counts(balance, len(self.costs), num_stages))
        is_uniform = balance == "uniform"
        weights = [1.0 if is_uniform else c.forward_s + c.backward_s for c in self.costs]
        return split_layers(self.layers, solve_balance(weights, num_stages))
