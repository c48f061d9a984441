"""Forecast each layout of stages, shards and chunks from the same measured layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.chunks import LayerCost, StepCosts
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.graph import ChunkPlan, SplitSizes, measure_split, split_chunks
from lightning_gnnpipe.layers import find_layers
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.planning.closed_forms import (
    LayoutWork,
    Link,
    graph_parallel_bytes,
    num_rounds,
    time_layout,
)
from lightning_gnnpipe.planning.pipeline_plan import LayoutForecast, StageForecast
from lightning_gnnpipe.stages import (
    Layers,
    Stage,
    Value,
    check_counts,
    choose_repeated,
    find_users,
    ids_in_stages,
    solve_balance,
    split_layers,
)
from lightning_gnnpipe.steps.gradient_sums import sent_bytes
from lightning_gnnpipe.types import Weights

_MANY_ROWS = 2**10  # enough to neglect the fixed bytes of a message
TRAINED = 4  # a weight, its gradient, two optimizer states


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all `tensors`."""
    return sum(one.nbytes for one in tensors)


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


@dataclass(frozen=True, slots=True)
class Measured:
    """A model and a graph, cut and timed.

    Attributes:
        costs: Of a step in the chunks of `chunks`.
        large_costs: Of a step in one chunk.
        root: The LightningModule, which `module` is a part of.
        leaf_bytes: Of the arguments that need gradients, by name.
        assignment: `[num_nodes]` the chunk of each node, on the CPU, as the edges are.
        kept_edges: `edge_index` without the edges that are dropped.
        loss_s: Seconds of loss, metrics and their backward.
    """

    module: nn.Module
    root: nn.Module
    layers: Layers
    costs: StepCosts
    large_costs: StepCosts
    chunks: ChunkPlan
    assignment: Tensor
    edge_index: Tensor
    kept_edges: Tensor
    batch_bytes: int
    leaf_bytes: Mapping[str, int]
    loss_s: float
    options: ForecastOptions

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs of all nodes."""
        row_bytes = sum(self.layers.values[name].row_bytes for name in self.layers.outputs)
        return row_bytes * self.chunks.num_nodes

    def total_rows(self, kind: Kind, edge_set: int) -> int:
        """Return the number of nodes, or of edges in one edge set."""
        chunks = self.chunks
        return chunks.num_nodes if kind is Kind.NODE else chunks.edge_set(edge_set).num_edges

    def num_rows(self, value: Value, chunk: int) -> int:
        """Return the number of rows of `value` in a chunk."""
        own = self.chunks.edge_set(value.edge_set).chunks[chunk]
        return own.num_nodes if value.kind is Kind.NODE else own.num_edges

    def split(self, num_shards: int, num_chunks: int) -> SplitSizes:
        """Return the sizes of the pieces of the graph, split as in training."""
        is_one = num_chunks == 1
        assignment = torch.zeros_like(self.assignment) if is_one else self.assignment
        shards = torch.zeros_like(assignment)
        if num_shards > 1:
            shards = split_chunks(self.edge_index, assignment, num_shards)
        edges = self.edge_index if is_one else self.kept_edges
        return measure_split(edges, assignment, shards, num_shards)

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


class LayoutForecaster:
    """Forecasts one layout."""

    def __init__(
        self, measured: Measured, num_stages: int, num_shards: int, num_chunks: int
    ) -> None:
        self._measured, self._num_shards = measured, num_shards
        self._num_chunks = num_chunks
        self._stages = measured.cut(num_stages, num_shards)
        self._sizes = measured.split(num_shards, num_chunks)
        self._users = find_users(self._stages, measured.module)
        self._messages = measured.options.strategy.messages
        self._codecs = get_codecs(self._messages.cut_codec)
        self._halo_codecs = get_codecs(self._messages.halo_codec)
        self._costs = measured.large_costs if num_chunks == 1 else measured.costs

    def forecast(self) -> LayoutForecast:
        """Add up the time, the bytes and the memory of a step."""
        measured, options = self._measured, self._measured.options
        step_s, bubble_frac = time_layout(self._work())
        outputs, num_ranks = measured.output_bytes, len(self._stages) * self._num_shards
        memory = max(stage.memory_bytes for stage in self.stages())
        memory += measured.batch_bytes + 2 * outputs
        sent = (
            self._input_bytes()
            + self._cut_bytes()
            + self._shard_bytes()
            + (num_ranks - 1) * outputs
        )
        return LayoutForecast(
            num_stages=len(self._stages),
            num_shards=self._num_shards,
            num_chunks=self._num_chunks,
            step_s=step_s,
            bubble_frac=bubble_frac,
            step_bytes=sent + self._gradient_bytes(options.strategy.weights),
            bytes_by_weights={one: sent + self._gradient_bytes(one) for one in get_args(Weights)},
            memory_bytes=memory,
            fits=options.memory_gib is None or memory <= options.memory_gib * 2**30,
        )

    def stages(self) -> list[StageForecast]:
        """Forecast time and memory of each stage."""
        measured, found = self._measured, []
        is_staged = measured.options.strategy.weights == "staged"
        every = list(measured.module.parameters())
        node_frac = float(self._sizes.nodes.sum(0).max()) / measured.chunks.num_nodes
        for stage, weights in zip(self._stages, self._weights(), strict=True):
            costs = self._costs.of(stage)
            found.append(
                StageForecast(
                    first_layer=stage.segments[0].index,
                    num_layers=len(stage.segments),
                    num_parameters=sum(p.numel() for p in weights),
                    compute_s=sum(cost.compute_s for cost in costs),
                    memory_bytes=TRAINED * bytes_of(weights if is_staged else every)
                    + round(self._row_frac() * sum(cost.history_bytes for cost in costs))
                    + round(node_frac * self._activations(stage, costs)),
                )
            )
        return found

    def _work(self) -> LayoutWork:
        measured, stages, sizes = self._measured, self._stages, self._sizes
        again = float(measured.options.strategy.histories.recomputes)
        costs = [self._costs.of(stage) for stage in stages]
        work = sizes.nodes + sizes.edges
        slowest = float(work.amax(1).sum() / work.sum())  # the slowest shard's share of the work
        rows = int(torch.maximum(sizes.sent, sizes.received).amax(1).sum())
        peers = int(sizes.peers.amax(1).sum())
        forward_s = [slowest * sum(c.forward_s for c in one) for one in costs]
        backward_s = [slowest * sum(c.backward_s for c in one) for one in costs]
        own = [bytes_of(weights) for weights in self._weights()]
        is_staged = measured.options.strategy.weights == "staged"
        ring = 2 * (self._num_shards - 1) / self._num_shards  # all-reduce over the shards
        return LayoutWork(
            num_chunks=self._num_chunks,
            forward_s=forward_s,
            backward_s=[again * a + b for a, b in zip(forward_s, backward_s, strict=True)],
            halo_bytes=[rows * sum(map(self._halo_row_bytes, one)) for one in costs],
            num_messages=[peers * sum(cost.num_pushes for cost in one) for one in costs],
            cut_bytes=[self._sent(stage, False) for stage in stages[:-1]],
            cut_grad_bytes=[self._sent(stage, True) for stage in stages[:-1]],
            link=measured.options.link,
            weight_bytes=(ring + (0 if is_staged else len(stages) - 1)) * max(own),
            output_bytes=measured.output_bytes,
            num_rounds=num_rounds(len(stages) * self._num_shards),
            loss_s=measured.loss_s,
            waits_for_halo=not self._messages.is_async,
        )

    def _sent(self, stage: Stage, is_grad: bool) -> float:
        """Return the bytes over a stage's cut, on its busiest rank."""
        sizes = self._sizes
        parts = torch.maximum(_largest_frac(sizes.nodes), _largest_frac(sizes.edges)).tolist()
        return sum(part * self._bytes(stage, chunk, is_grad) for chunk, part in enumerate(parts))

    def _cut_bytes(self) -> int:
        """Return the bytes of rows and gradients over all cuts."""
        return sum(
            self._bytes(stage, chunk, is_grad)
            for stage in self._stages[:-1]
            for chunk in range(self._measured.chunks.num_chunks)
            for is_grad in (False, True)
        )

    def _bytes(self, stage: Stage, chunk: int, is_grad: bool) -> int:
        measured = self._measured
        values = [measured.layers.values[name] for name in stage.sent]
        codec = self._codecs.grads if is_grad else self._codecs.rows
        return sum(
            codec.payload_bytes((measured.num_rows(one, chunk), *one.row_shape), one.dtype)
            for one in values
            if one.requires_grad or not is_grad
        )

    def _shard_bytes(self) -> int:
        """Return the bytes of halo rows and their gradients."""
        measured = self._measured
        if self._num_shards == 1:
            return 0
        num_nodes = measured.chunks.num_nodes
        return graph_parallel_bytes(
            num_layers=1,
            replicas_per_node=int(self._sizes.received.sum()) / num_nodes,
            num_nodes=num_nodes,
            row_bytes=sum(map(self._halo_row_bytes, measured.costs.layers)),
            weight_bytes=0,
            num_shards=self._num_shards,
        )

    def _halo_row_bytes(self, cost: LayerCost) -> int:
        """Return the encoded bytes of a layer's row, mean of both directions; approximate."""
        shape = (_MANY_ROWS, cost.pushed_row_bytes // 4)
        num_bytes = sum(codec.payload_bytes(shape, torch.float32) for codec in self._halo_codecs)
        return num_bytes // (len(self._halo_codecs) * _MANY_ROWS)

    def _activations(self, stage: Stage, costs: Sequence[LayerCost]) -> int:
        """Return the bytes kept between forward and backward, of all shards."""
        measured = self._measured
        if not measured.options.strategy.histories.recomputes:
            return sum(cost.saved_bytes for cost in costs)
        values = [measured.layers.values[name] for name in stage.received]
        return sum(v.row_bytes * measured.total_rows(v.kind, v.edge_set) for v in values)

    def _row_frac(self) -> float:
        """Return the history rows of the shard with the most, over the number of nodes."""
        is_disjoint = self._num_shards == 1 and self._measured.chunks.is_disjoint
        has_none = is_disjoint and not find_layers(self._measured.module).sees_all_nodes
        if has_none or self._num_chunks == 1:
            return 0.0  # nothing is read of other chunks
        rows = self._sizes.nodes.sum(0) + self._sizes.received.sum(0)
        return float(rows.max()) / self._measured.chunks.num_nodes

    def _gradient_bytes(self, weights: Weights) -> int:
        """Return the bytes of gradients of `weights`, a value of the strategy's option.

        The shards of a stage sum the gradients of its weights. All stages receive the sums, by
        shard; with "staged" only the stages that use the weights. A sum takes two times as much as
        a copy. Of weights outside of stages the first rank sends copies.
        """
        measured, num_shards, total = self._measured, self._num_shards, 0
        num_others = len(self._stages) - 1
        for name, p in measured.module.named_parameters():
            num_users = len(self._users.get(name, ()))
            if p.requires_grad and num_users:
                copies = num_others * num_shards * (1 + (num_users > 1))
                if weights == "staged":
                    copies = 2 * (num_users - 1) * num_shards
                total += sent_bytes([p]) * (2 * num_users * (num_shards - 1) + copies)
        own = ids_in_stages(measured.module, measured.root, self._users, [measured.layers])
        outer = (p for p in measured.root.parameters() if p.requires_grad and id(p) not in own)
        return total + (len(self._stages) * num_shards - 1) * sent_bytes(outer)

    def _input_bytes(self) -> int:
        """Return the bytes of gradients of arguments: copies of one stage's, or a sum over all."""
        num_stages, num_shards, total = len(self._stages), self._num_shards, 0
        for name, num_bytes in self._measured.leaf_bytes.items():
            num_readers = sum(name in stage.leaves for stage in self._stages)
            copies = (num_stages - 1) * num_shards + 2 * (num_shards - 1) if num_readers else 0
            sums = 2 * (num_stages * num_shards - 1)
            total += num_bytes * (sums if num_readers > 1 else copies)
        return total

    def _weights(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each stage."""
        users, named = self._users, list(self._measured.module.named_parameters())
        return [[p for n, p in named if s.index in users.get(n, ())] for s in self._stages]


def _largest_frac(counts: Tensor) -> Tensor:
    """Return `[num_chunks]` the largest count in each row over its sum; 0 for empty rows."""
    return counts.amax(1).double() / counts.sum(1).clamp(min=1)
