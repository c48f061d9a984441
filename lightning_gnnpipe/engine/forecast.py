"""What training in a pipeline will be like, before it begins: cuts, times, bytes, memory.

model -> layers, measured  -> stages        \
    graph -> chunks                              > simulated step -> a PipelinePlan
link speed                                  /
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_gnnpipe.engine.costs import LayerCost, measure_layers, work_of
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.model import Balance
from lightning_gnnpipe.engine.names import LayerNames
from lightning_gnnpipe.engine.pipeline_plan import PipelinePlan, StageForecast, with_advice
from lightning_gnnpipe.engine.probe import check_layers
from lightning_gnnpipe.graph import (
    ChunkPlan,
    build_chunk_plan,
    check_graph,
    edge_cut_frac,
    partition_nodes,
    replicas_per_node,
)
from lightning_gnnpipe.history import HistoryOptions
from lightning_gnnpipe.passing import check_support, find_convs, without_memory
from lightning_gnnpipe.schedule import (
    Action,
    Op,
    add_transfers,
    fill_drain,
    graph_parallel_bytes,
    simulate,
)
from lightning_gnnpipe.stages import (
    Call,
    Inputs,
    Kind,
    Layers,
    Stage,
    Value,
    check_counts,
    cut_layers,
    draw_sample,
    find_users,
    is_listed,
    learn_values,
    solve_balance,
    split_layers,
    trace,
)
from lightning_gnnpipe.types import Partition


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """What the pipeline would be.

    Attributes:
        num_stages: Stages, S.
        num_chunks: Chunks, K.
        partition: How nodes are dealt out to chunks.
        balance: How layers are dealt out to stages.
        histories: How histories are kept, and whether activations are not.
        self_check: Whether the module is tried out on a small graph.
        link_gbit_per_s: Speed of the link between two devices, each way.
    """

    num_stages: int
    num_chunks: int
    partition: Partition
    balance: Balance
    histories: HistoryOptions
    self_check: bool
    link_gbit_per_s: float


def forecast(
    module: nn.Module,
    call: Call,
    inputs: Inputs,
    options: ForecastOptions,
    time_loss: Callable[[Any], float],
) -> PipelinePlan:
    """Cut `module` and the graph of `call`, time each layer on a few chunks, simulate a step.

    Args:
        module: The pipelined module.
        call: Its arguments.
        inputs: What they are.
        options: See `ForecastOptions`.
        time_loss: Takes an output of `module`, returns the seconds that the step goes on for.

    Raises:
        GraphError: If the graph is malformed.
        UnsupportedError: If the module cannot be pipelined.
        ConfigError: If there are more stages than layers, or more chunks than nodes.
    """
    check_support(module, options.num_chunks)
    check_graph(inputs.edge_index.cpu(), inputs.num_nodes)
    with without_memory(find_convs(module)):
        graph = trace(module, call)
        sample = draw_sample(module, call, inputs)
        layers = cut_layers(graph, module, learn_values(graph, module, sample))
    if options.self_check and (options.num_chunks > 1 or is_listed(module)):
        check_layers(module, layers, call, inputs, on_chunks=options.num_chunks > 1)
    edge_index = inputs.edge_index.cpu()
    plan = build_chunk_plan(
        edge_index,
        inputs.num_nodes,
        num_chunks=options.num_chunks,
        partition=options.partition,
    )
    plan = plan.with_edge_sets(inputs.edge_sizes).to(inputs.edge_index.device)
    planned = PlannedInputs(plan)
    planned.load(call, inputs)
    histories = options.histories.seen_from(plan.perm.device)
    costs = measure_layers(module, layers, plan, planned, histories)
    stages = split_layers(layers, _count_layers(costs, options))
    loss_s = time_loss(_blank_output(layers, inputs))
    return _Forecaster(module, layers, costs, stages, plan, options).plan(inputs, loss_s)


def _blank_output(layers: Layers, inputs: Inputs) -> Any:
    """Return what the module would return, in shape."""
    known = (layers.values[name] for name in layers.outputs)
    tensors = [
        torch.zeros(
            (inputs.num_nodes, *value.row_shape),
            dtype=value.dtype,
            device=inputs.edge_index.device,
            requires_grad=value.requires_grad,
        )
        for value in known
    ]
    return layers.rebuild_output(tensors)


def _count_layers(costs: Sequence[LayerCost], options: ForecastOptions) -> Sequence[int]:
    if not isinstance(options.balance, str):
        return check_counts(options.balance, len(costs), options.num_stages)
    is_measured = options.balance == "measured"
    weights = [c.forward_s + c.backward_s if is_measured else 1.0 for c in costs]
    return solve_balance(weights, options.num_stages)


class _Forecaster:
    def __init__(
        self,
        module: nn.Module,
        layers: Layers,
        costs: Sequence[LayerCost],
        stages: tuple[Stage, ...],
        plan: ChunkPlan,
        options: ForecastOptions,
    ) -> None:
        self.module, self.layers, self.costs = module, layers, costs
        self.stages, self.chunks, self.options = stages, plan, options
        total = sum(work_of(chunk) for chunk in plan.chunks)
        self.shares = [work_of(chunk) / total for chunk in plan.chunks]
        self.bytes_per_s = options.link_gbit_per_s * 1e9 / 8

    def plan(self, inputs: Inputs, loss_s: float) -> PipelinePlan:
        edge_index, num_nodes = inputs.edge_index.cpu(), inputs.num_nodes
        num_stages = len(self.stages)
        timeline = simulate(
            add_transfers(fill_drain(num_stages, tuple(range(self.chunks.num_chunks)))),
            cost=self._seconds,
        )
        spread_bytes = (num_stages - 1) * num_nodes * self._row_bytes(self.layers.outputs)
        compute_s = sum(cost.forward_s + cost.backward_s for cost in self.costs)
        rival_bytes = self._graph_parallel_bytes(edge_index, num_nodes)
        owner = self.chunks.chunk_of_position()
        found = PipelinePlan(
            num_nodes=num_nodes,
            num_edges=edge_index.size(1),
            layer_names=tuple(map(LayerNames(self.module).of, self.layers.segments)),
            layer_costs=tuple(self.costs),
            stages=tuple(self._stages()),
            chunk_rows=tuple(chunk.num_nodes for chunk in self.chunks.chunks),
            chunk_edges=tuple(chunk.num_edges for chunk in self.chunks.chunks),
            halo_rows=tuple(chunk.num_halo for chunk in self.chunks.chunks),
            edge_cut_frac=edge_cut_frac(self.chunks.whole.chunks[0].edge_index, owner),
            step_s=timeline.span + spread_bytes / self.bytes_per_s + loss_s,
            loss_s=loss_s,
            bubble_frac=timeline.bubble_frac,
            step_bytes=spread_bytes + self._crossing_bytes(),
            one_device_s=compute_s + loss_s,
            graph_parallel_s=(compute_s + loss_s + rival_bytes / self.bytes_per_s) / num_stages,
            graph_parallel_bytes=rival_bytes,
            link_gbit_per_s=self.options.link_gbit_per_s,
        )
        return with_advice(found)

    def _seconds(self, action: Action) -> float:
        """Return the cost of an action: measured for computing, by bytes for a transfer."""
        share, stage = self.shares[action.chunk], self.stages[action.stage]
        costs = [self.costs[segment.index] for segment in stage.segments]
        if action.op is Op.F:
            return share * sum(cost.forward_s for cost in costs)
        if action.op is Op.B:
            again_s = self.options.histories.recomputes * sum(cost.forward_s for cost in costs)
            return share * (again_s + sum(cost.backward_s for cost in costs))
        names = stage.sent if action.op is Op.SEND_F else stage.received
        values = [self.layers.values[name] for name in names]
        if action.op is Op.SEND_B:
            values = [value for value in values if value.requires_grad]
        total = sum(self._bytes(value, action.chunk) for value in values)
        return total / self.bytes_per_s

    def _crossing_bytes(self) -> int:
        """Return what crosses the cuts: values forth, and gradients back where there are any."""
        names = [name for stage in self.stages[:-1] for name in stage.sent]
        values = [self.layers.values[name] for name in names]
        return sum(
            self._bytes(value, chunk.index) * (2 if value.requires_grad else 1)
            for value in values
            for chunk in self.chunks.chunks
        )

    def _bytes(self, value: Value, chunk: int) -> int:
        own = self.chunks.edge_set(value.edge_set).chunks[chunk]
        return value.row_bytes * (own.num_nodes if value.kind is Kind.NODE else own.num_edges)

    def _row_bytes(self, names: Sequence[str]) -> int:
        return sum(self.layers.values[name].row_bytes for name in names)

    def _graph_parallel_bytes(self, edge_index: torch.Tensor, num_nodes: int) -> int:
        num_shards = len(self.stages)
        if num_shards == 1:
            return 0
        shards = partition_nodes(
            edge_index, num_nodes, num_chunks=num_shards, method="metis", seed=0
        )
        exchanged = sum(cost.pushed_row_bytes for cost in self.costs)
        return graph_parallel_bytes(
            num_layers=1,
            replicas_per_node=replicas_per_node(edge_index, num_nodes, shards),
            num_nodes=num_nodes,
            row_bytes=exchanged,
            weight_bytes=sum(p.numel() * p.element_size() for p in self.module.parameters()),
            num_shards=num_shards,
        )

    def _activations(self, stage: Stage, costs: Sequence[LayerCost]) -> int:
        """Return the bytes that are kept between forward and backward."""
        if not self.options.histories.recomputes:
            return sum(cost.saved_bytes for cost in costs)
        values = [self.layers.values[name] for name in stage.received]
        return sum(
            self._bytes(value, chunk.index) for value in values for chunk in self.chunks.chunks
        )

    def _stages(self) -> list[StageForecast]:
        users = find_users(self.stages, self.module)
        parameters = dict(self.module.named_parameters())
        found = []
        for stage in self.stages:
            costs = [self.costs[segment.index] for segment in stage.segments]
            own = [p for n, p in parameters.items() if stage.index in users.get(n, ())]
            weight_bytes = sum(p.numel() * p.element_size() for p in own)
            found.append(
                StageForecast(
                    first_layer=stage.segments[0].index,
                    num_layers=len(stage.segments),
                    num_parameters=sum(p.numel() for p in own),
                    compute_s=sum(cost.forward_s + cost.backward_s for cost in costs),
                    memory_bytes=4 * weight_bytes
                    + sum(cost.history_bytes for cost in costs)
                    + self._activations(stage, costs),
                )
            )
        return found
