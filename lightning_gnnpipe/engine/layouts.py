"""Ways to deal devices out to stages and shards, each forecast from the same measured layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import MessageOptions, get_codec
from lightning_gnnpipe.engine.costs import LayerCost, work_of
from lightning_gnnpipe.engine.model import Balance
from lightning_gnnpipe.engine.pipeline_plan import LayoutForecast, StageForecast
from lightning_gnnpipe.graph import ChunkPlan, SplitSizes, measure_split, split_chunks
from lightning_gnnpipe.history import HistoryOptions
from lightning_gnnpipe.schedule import (
    LayoutWork,
    graph_parallel_bytes,
    simulate_layout,
)
from lightning_gnnpipe.stages import (
    Kind,
    Layers,
    Stage,
    Value,
    check_counts,
    find_users,
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
        link_gbit_per_s: Speed of the link of each rank, each way.
        memory_gib: Memory of a rank; None for any.
    """

    balance: Balance
    histories: HistoryOptions
    messages: MessageOptions
    link_gbit_per_s: float
    memory_gib: float | None


@dataclass(frozen=True)
class Measured:
    """A model and a graph, cut and timed.

    Attributes:
        module: The pipelined module.
        layers: Its layers.
        costs: What each costs.
        chunks: The chunks of the graph.
        edge_index: `[2, num_edges]` on the CPU.
        batch_bytes: Bytes of the batch.
        loss_s: Seconds that the step goes on for behind the module.
        options: What all layouts have in common.
    """

    module: nn.Module
    layers: Layers
    costs: Sequence[LayerCost]
    chunks: ChunkPlan
    edge_index: Tensor
    batch_bytes: int
    loss_s: float
    options: LayoutOptions

    @property
    def bytes_per_s(self) -> float:
        """Speed of a link."""
        return self.options.link_gbit_per_s * 1e9 / 8

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
        shards = torch.zeros_like(self.assignment)
        if num_shards > 1:
            shards = split_chunks(self.edge_index, self.assignment, num_shards)
        return measure_split(self.edge_index, self.assignment, shards, num_shards)

    def cut(self, num_stages: int) -> tuple[Stage, ...]:
        """Return the stages, as training would deal layers out to them."""
        balance = self.options.balance
        if not isinstance(balance, str) and len(balance) == num_stages:
            return split_layers(self.layers, check_counts(balance, len(self.costs), num_stages))
        is_uniform = balance == "uniform"
        weights = [1.0 if is_uniform else c.forward_s + c.backward_s for c in self.costs]
        return split_layers(self.layers, solve_balance(weights, num_stages))


class LayoutForecaster:
    """Forecasts one layout.

    Args:
        measured: Model and graph.
        stages: The layers of each rank.
        sizes: The pieces of the graph of each rank.
    """

    def __init__(self, measured: Measured, stages: tuple[Stage, ...], sizes: SplitSizes) -> None:
        self._measured, self._stages, self._sizes = measured, stages, sizes
        self._num_shards = sizes.nodes.size(1)
        self._codec = get_codec(measured.messages.cut_codec)
        self._num_ranks = len(stages) * self._num_shards

    def forecast(self) -> LayoutForecast:
        """Return what a step takes."""
        measured, options = self._measured, self._measured.options
        times = simulate_layout(self._work())
        outputs = measured.row_bytes(measured.layers.outputs) * measured.chunks.num_nodes
        memory = max(stage.memory_bytes for stage in self.stages())
        memory += measured.batch_bytes + 2 * outputs
        is_enough = options.memory_gib is None or memory <= options.memory_gib * 2**30
        return LayoutForecast(
            num_stages=len(self._stages),
            num_shards=self._num_shards,
            step_s=times.step_s,
            bubble_frac=times.bubble_frac,
            step_bytes=self._cut_bytes() + self._shard_bytes() + (self._num_ranks - 1) * outputs,
            memory_bytes=memory,
            fits=is_enough,
        )

    def stages(self) -> list[StageForecast]:
        """Return what each stage computes and keeps."""
        found = []
        for stage, weights in zip(self._stages, self._weights(), strict=True):
            costs = self._costs(stage)
            found.append(
                StageForecast(
                    first_layer=stage.segments[0].index,
                    num_layers=len(stage.segments),
                    num_parameters=sum(p.numel() for p in weights),
                    compute_s=sum(cost.forward_s + cost.backward_s for cost in costs),
                    memory_bytes=4 * _bytes_of(weights)
                    + round(self._row_frac() * sum(cost.history_bytes for cost in costs))
                    + round(self._node_frac() * self._activations(stage, costs)),
                )
            )
        return found

    def _work(self) -> LayoutWork:
        measured, stages = self._measured, self._stages
        again = float(measured.options.histories.recomputes)
        sizes, costs = self._sizes, [self._costs(stage) for stage in stages]
        total = sum(work_of(chunk) for chunk in measured.chunks.chunks)
        work = (sizes.nodes + sizes.edges).amax(1) / total
        swapped = torch.maximum(sizes.sent, sizes.received).amax(1)
        outputs = measured.row_bytes(measured.layers.outputs)
        forward_s = [sum(c.forward_s for c in one) for one in costs]
        return LayoutWork(
            num_shards=self._num_shards,
            forward_s=forward_s,
            backward_s=[
                again * s + sum(c.backward_s for c in one)
                for s, one in zip(forward_s, costs, strict=True)
            ],
            halo_row_bytes=[sum(map(self._halo_row_bytes, one)) for one in costs],
            cut_bytes=[self._sent(stage, False) for stage in stages[:-1]],
            cut_grad_bytes=[self._sent(stage, True) for stage in stages[:-1]],
            work_fracs=work.tolist(),
            halo_rows=swapped.tolist(),
            weight_bytes=[_bytes_of(weights) for weights in self._weights()],
            output_bytes=outputs * measured.chunks.num_nodes,
            loss_s=measured.loss_s,
            bytes_per_s=measured.bytes_per_s,
            waits_for_halo=not measured.messages.is_async,
        )

    def _sent(self, stage: Stage, is_grad: bool) -> list[float]:
        """Return for each chunk the bytes that the busiest rank of a stage sends on, or gets."""
        sizes = self._sizes
        parts = torch.maximum(_largest_frac(sizes.nodes), _largest_frac(sizes.edges)).tolist()
        return [part * self._bytes(stage, chunk, is_grad) for chunk, part in enumerate(parts)]

    def _cut_bytes(self) -> int:
        """Return what crosses the cuts: values forth, and gradients back where there are any."""
        return sum(
            self._bytes(stage, chunk, is_grad)
            for stage in self._stages[:-1]
            for chunk in range(self._measured.chunks.num_chunks)
            for is_grad in (False, True)
        )

    def _bytes(self, stage: Stage, chunk: int, is_grad: bool) -> int:
        measured = self._measured
        values = [measured.layers.values[name] for name in stage.sent]
        return sum(
            self._codec.payload_bytes((measured.num_rows(one, chunk), *one.row_shape), one.dtype)
            for one in values
            if one.requires_grad or not is_grad
        )

    def _shard_bytes(self) -> int:
        """Return what the ranks of a stage swap and sum."""
        measured = self._measured
        if self._num_shards == 1:
            return 0
        num_nodes = measured.chunks.num_nodes
        return graph_parallel_bytes(
            num_layers=1,
            replicas_per_node=int(self._sizes.received.sum()) / num_nodes,
            num_nodes=num_nodes,
            row_bytes=sum(map(self._halo_row_bytes, measured.costs)),
            weight_bytes=_bytes_of(list(measured.module.parameters())),
            num_shards=self._num_shards,
        )

    def _halo_row_bytes(self, cost: LayerCost) -> int:
        """Return the bytes of a layer's rows as they are sent; of codecs about."""
        codec = get_codec(self._measured.messages.halo_codec)
        return codec.payload_bytes((1, cost.pushed_row_bytes // 4), torch.float32)

    def _activations(self, stage: Stage, costs: Sequence[LayerCost]) -> int:
        """Return the bytes that are kept between forward and backward, of all shards."""
        measured = self._measured
        if not measured.options.histories.recomputes:
            return sum(cost.saved_bytes for cost in costs)
        values = [measured.layers.values[name] for name in stage.received]
        chunks = range(measured.chunks.num_chunks)
        return sum(v.row_bytes * measured.num_rows(v, chunk) for v in values for chunk in chunks)

    def _node_frac(self) -> float:
        """Return the largest share of the nodes that a shard has."""
        return float(self._sizes.nodes.sum(0).max()) / self._measured.chunks.num_nodes

    def _row_frac(self) -> float:
        """Return the rows, ghosts included, of the shard with the most, over all nodes."""
        rows = self._sizes.nodes.sum(0) + self._sizes.received.sum(0)
        return float(rows.max()) / self._measured.chunks.num_nodes

    def _costs(self, stage: Stage) -> list[LayerCost]:
        return [self._measured.costs[segment.index] for segment in stage.segments]

    def _weights(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each stage."""
        users = find_users(self._stages, self._measured.module)
        named = list(self._measured.module.named_parameters())
        return [[p for n, p in named if s.index in users.get(n, ())] for s in self._stages]


def _largest_frac(counts: Tensor) -> Tensor:
    """Return `[num_chunks]` the largest share of a row's sum; 0 where that is 0."""
    return counts.amax(1).double() / counts.sum(1).clamp(min=1)


def _bytes_of(weights: Sequence[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in weights)
