"""Inputs of a forecast: the measured model, the graph, the link between devices.

A message of `num_bytes` over a link takes

    seconds = message_s + num_bytes / bytes_per_s

Most of `message_s` is the time to wake up a waiting rank while all cores compute.

Source: Hockney, The communication challenge for MPP (1994).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.chunks import StepCosts
from lightning_gnnpipe.graph import ChunkPlan, SplitSizes, measure_split
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.planning.plain_step import PlainStep
from lightning_gnnpipe.stages import (
    Layers,
    Stage,
    Value,
    check_counts,
    choose_repeated,
    solve_balance,
    split_layers,
)


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """Settings of a forecast.

    Attributes:
        strategy: Its layout and number of chunks are ignored.
        layout: (stages, shards); None for the best.
        memory_gib: Memory of a rank; None for no limit.
    """

    strategy: StrategyOptions
    num_devices: int
    layout: tuple[int, int] | None
    num_chunks: int
    link: Link
    memory_gib: float | None


@dataclass(frozen=True)
class Measured:
    """A model and a graph, cut and timed.

    Attributes:
        copied_bytes_per_s: See `measure_copies`.
        edge_index: `[2, num_edges]` on the CPU.
        find_shards: Returns `[num_nodes]` the shard of each node, given the number of shards.
        loss_s: Seconds of loss, metrics and their backward.
    """

    module: nn.Module
    layers: Layers
    costs: StepCosts
    copied_bytes_per_s: float
    chunks: ChunkPlan
    edge_index: Tensor
    find_shards: Callable[[int], Tensor]
    batch_bytes: int
    loss_s: float
    plain: PlainStep | None
    options: ForecastOptions

    @property
    def one_device_s(self) -> float:
        """Seconds of a step of the same chunks on one device."""
        return sum(cost.compute_s for cost in self.costs.layers) + self.loss_s

    @property
    def plain_s(self) -> float | None:
        """Seconds of a step of a plain Trainer; None if unknown."""
        return None if self.plain is None else self.plain.seconds + self.loss_s

    @property
    def plain_bytes(self) -> int | None:
        """Bytes of activations, outputs, batch and weights of a plain Trainer."""
        if self.plain is None:
            return None
        outputs = self.row_bytes(self.layers.outputs) * self.chunks.num_nodes
        weights = TRAINED * bytes_of(self.module.parameters())
        return self.plain.saved_bytes + self.batch_bytes + 2 * outputs + weights

    @cached_property
    def assignment(self) -> Tensor:
        """`[num_nodes]` the chunk of each node."""
        found = torch.empty_like(self.chunks.perm, device="cpu")
        found[self.chunks.perm.cpu()] = self.chunks.chunk_of_position().cpu()
        return found

    def row_bytes(self, names: Sequence[str]) -> int:
        """Return the bytes of one row of each of these values together."""
        return sum(self.layers.values[name].row_bytes for name in names)

    def total_rows(self, kind: Kind, edge_set: int) -> int:
        """Return the number of nodes, or of edges in one edge set."""
        chunks = self.chunks
        return chunks.num_nodes if kind is Kind.NODE else chunks.edge_set(edge_set).num_edges

    def num_rows(self, value: Value, chunk: int) -> int:
        """Return the number of rows of `value` in a chunk."""
        own = self.chunks.edge_set(value.edge_set).chunks[chunk]
        return own.num_nodes if value.kind is Kind.NODE else own.num_edges

    def split(self, num_shards: int) -> SplitSizes:
        """Return the sizes of the pieces of the graph, split as in training."""
        is_split = num_shards > 1
        shards = self.find_shards(num_shards) if is_split else torch.zeros_like(self.assignment)
        return measure_split(self.edge_index, self.assignment, shards, num_shards)

    def cut(self, num_stages: int, num_shards: int) -> tuple[Stage, ...]:
        """Return the stages, with layers assigned as in training."""
        layers, options = self.layers, self.options.strategy
        num_layers, balance = len(layers.segments), options.balance
        repeated = choose_repeated(layers, options.repeat_encoder, self.total_rows, num_shards)
        if not isinstance(balance, str) and len(balance) == num_stages:
            counts = check_counts(balance, num_layers, num_stages)
        elif balance == "uniform":
            counts = solve_balance([1.0] * num_layers, num_stages)
        else:
            counts = self.costs.assign_layers(layers, num_stages, repeated)
        return split_layers(layers, counts, repeated)


TRAINED = 4  # a weight, its gradient, two optimizer states


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all `tensors`."""
    return sum(one.numel() * one.element_size() for one in tensors)


# Seconds of a message by gloo between two processes of a machine with two cores, while both
# compute: the median in `examples/benchmarks/prediction`.
MESSAGE_S = 1.4e-3


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a rank: bytes per second each way, and seconds per message of any size."""

    bytes_per_s: float
    message_s: float = MESSAGE_S

    @staticmethod
    def of(gbit_per_s: float, message_s: float = MESSAGE_S) -> Link:
        """Return a link from its speed in Gbit/s, each way."""
        return Link(gbit_per_s * 1e9 / 8, message_s)

    @property
    def gbit_per_s(self) -> float:
        """Speed in Gbit/s, each way."""
        return self.bytes_per_s * 8 / 1e9
