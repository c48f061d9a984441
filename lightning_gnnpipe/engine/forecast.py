"""What training in a pipeline will be like, before it begins: cuts, times, bytes, memory.

model -> layers, measured  -> stages        \
    graph -> chunks                              > simulated step -> a PipelinePlan
link speed                                  /
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lightning_gnnpipe.engine.costs import LayerCost, measure_layers, work_of
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.model import Balance
from lightning_gnnpipe.engine.probe import check_layers
from lightning_gnnpipe.graph import (
    ChunkPlan,
    build_chunk_plan,
    check_graph,
    edge_cut_frac,
    partition_nodes,
    replicas_per_node,
)
from lightning_gnnpipe.passing import check_support, find_convs, without_caches
from lightning_gnnpipe.schedule import (
    Action,
    Op,
    add_transfers,
    fill_drain,
    graph_parallel_bytes,
    pipeline_bytes,
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
    learn_values,
    solve_balance,
    split_layers,
    trace,
)
from lightning_gnnpipe.types import Partition

_FEW_LAYERS = 8
_SHORT_CHUNK_S = 2e-3  # below it, Python's share of a chunk's time is large


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage, in a training step over all nodes.

    Attributes:
        first_layer: Number of its first layer, from 0.
        num_layers: Message-passing layers.
        num_parameters: Numbers in its weights.
        compute_s: Seconds, forward and backward.
        memory_bytes: Histories, gradient buffers, activations and weights with two optimizer
            states; the batch and its edges are not in it.
    """

    first_layer: int
    num_layers: int
    num_parameters: int
    compute_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a model and a graph would be cut, and what a training step would take.

    Attributes:
        num_nodes: Nodes, N.
        num_edges: Edges, E.
        layer_names: The message-passing layers, by name.
        layer_costs: What each costs in a step.
        stages: The stages.
        chunk_rows: Nodes of each chunk.
        chunk_edges: Edges that end in each chunk.
        halo_rows: Nodes outside that each chunk reads.
        edge_cut_frac: Share of the edges that join two chunks.
        step_s: Predicted seconds a training step of the pipeline, without loss and optimizer.
        bubble_frac: Share of all stages' time in which they do not compute.
        step_bytes: Bytes a step sends.
        one_device_s: Predicted seconds of the same chunks on one device.
        graph_parallel_s: Predicted seconds of graph parallelism on as many devices: its share of
            the computing, and its bytes over the link, without overlap.
        graph_parallel_bytes: Bytes that it sends.
        link_gbit_per_s: The link's speed that times are for.
        advice: What speaks against a pipeline here; empty if nothing does.
    """

    num_nodes: int
    num_edges: int
    layer_names: tuple[str, ...]
    layer_costs: tuple[LayerCost, ...]
    stages: tuple[StageForecast, ...]
    chunk_rows: tuple[int, ...]
    chunk_edges: tuple[int, ...]
    halo_rows: tuple[int, ...]
    edge_cut_frac: float
    step_s: float
    bubble_frac: float
    step_bytes: int
    one_device_s: float
    graph_parallel_s: float
    graph_parallel_bytes: int
    link_gbit_per_s: float
    advice: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """What the pipeline would be.

    Attributes:
        num_stages: Stages, S.
        num_chunks: Chunks, K.
        partition: How nodes are dealt out to chunks.
        balance: How layers are dealt out to stages.
        recompute: Whether activations are computed again in backward.
        link_gbit_per_s: Speed of the link between two devices, each way.
    """

    num_stages: int
    num_chunks: int
    partition: Partition
    balance: Balance
    recompute: bool
    link_gbit_per_s: float


def forecast(
    module: nn.Module, call: Call, inputs: Inputs, options: ForecastOptions
) -> PipelinePlan:
    """Cut `module` and the graph of `call`, time each layer on a few chunks, simulate a step.

    Raises:
        GraphError: If the graph is malformed.
        UnsupportedError: If the module cannot be pipelined.
        ConfigError: If there are more stages than layers, or more chunks than nodes.
    """
    check_support(module, options.num_chunks)
    check_graph(inputs.edge_index.cpu(), inputs.num_nodes)
    with without_caches(find_convs(module)):
        graph = trace(module, call)
        sample = draw_sample(module, call, inputs)
        layers = cut_layers(graph, module, learn_values(graph, module, sample))
    check_layers(module, layers, call, inputs, on_chunks=options.num_chunks > 1)
    edge_index = inputs.edge_index.cpu()
    plan = build_chunk_plan(
        edge_index,
        inputs.num_nodes,
        num_chunks=options.num_chunks,
        partition=options.partition,
    ).to(inputs.edge_index.device)
    planned = PlannedInputs(plan)
    planned.load(call, inputs)
    costs = measure_layers(module, layers, plan, planned)
    stages = split_layers(layers, _count_layers(costs, options))
    return _Forecaster(module, layers, costs, stages, plan, options).plan(inputs)


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

    def plan(self, inputs: Inputs) -> PipelinePlan:
        edge_index, num_nodes = inputs.edge_index.cpu(), inputs.num_nodes
        num_stages = len(self.stages)
        timeline = simulate(
            add_transfers(fill_drain(num_stages, tuple(range(self.chunks.num_chunks)))),
            cost=self._seconds,
        )
        output_bytes = self._row_bytes(self.layers.outputs)
        step_bytes = pipeline_bytes(
            num_stages=num_stages,
            num_nodes=num_nodes,
            row_bytes=[0] * (num_stages - 1),
            output_row_bytes=output_bytes,
        )
        for stage in self.stages[:-1]:
            values = [self.layers.values[name] for name in stage.sent]
            step_bytes += sum(self._bytes(v, num_nodes, edge_index.size(1)) for v in values)
            back = [v for v in values if v.requires_grad]
            step_bytes += sum(self._bytes(v, num_nodes, edge_index.size(1)) for v in back)
        spread_s = (num_stages - 1) * num_nodes * output_bytes / self.bytes_per_s
        compute_s = sum(cost.forward_s + cost.backward_s for cost in self.costs)
        rival_bytes = self._graph_parallel_bytes(edge_index, num_nodes)
        owner = self.chunks.chunk_of_position()
        found = PipelinePlan(
            num_nodes=num_nodes,
            num_edges=edge_index.size(1),
            layer_names=tuple(self._names()),
            layer_costs=tuple(self.costs),
            stages=tuple(self._stages()),
            chunk_rows=tuple(chunk.num_nodes for chunk in self.chunks.chunks),
            chunk_edges=tuple(chunk.num_edges for chunk in self.chunks.chunks),
            halo_rows=tuple(chunk.num_halo for chunk in self.chunks.chunks),
            edge_cut_frac=edge_cut_frac(self.chunks.whole.chunks[0].edge_index, owner),
            step_s=timeline.span + spread_s,
            bubble_frac=timeline.bubble_frac,
            step_bytes=step_bytes,
            one_device_s=compute_s,
            graph_parallel_s=compute_s / num_stages + rival_bytes / num_stages / self.bytes_per_s,
            graph_parallel_bytes=rival_bytes,
            link_gbit_per_s=self.options.link_gbit_per_s,
        )
        return _with_advice(found)

    def _seconds(self, action: Action) -> float:
        """Return the cost of an action: measured for computing, by bytes for a transfer."""
        share, stage = self.shares[action.chunk], self.stages[action.stage]
        costs = [self.costs[segment.index] for segment in stage.segments]
        if action.op is Op.F:
            return share * sum(cost.forward_s for cost in costs)
        if action.op is Op.B:
            again = sum(cost.forward_s for cost in costs) if self.options.recompute else 0.0
            return share * (again + sum(cost.backward_s for cost in costs))
        chunk = self.chunks.chunks[action.chunk]
        names = stage.sent if action.op is Op.SEND_F else stage.received
        values = [self.layers.values[name] for name in names]
        if action.op is Op.SEND_B:
            values = [value for value in values if value.requires_grad]
        total = sum(self._bytes(value, chunk.num_nodes, chunk.num_edges) for value in values)
        return total / self.bytes_per_s

    @staticmethod
    def _bytes(value: Value, num_nodes: int, num_edges: int) -> int:
        return value.row_bytes * (num_nodes if value.kind is Kind.NODE else num_edges)

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
        if not self.options.recompute:
            return sum(cost.saved_bytes for cost in costs)
        values = [self.layers.values[name] for name in stage.received]
        return sum(
            self._bytes(value, self.chunks.num_nodes, self.chunks.num_edges) for value in values
        )

    def _names(self) -> list[str]:
        convs = {id(conv): name for name, conv in find_convs(self.module).items()}
        names = []
        for segment in self.layers.segments:
            used = [name for m in segment.module.modules() if (name := convs.get(id(m)))]
            names.append(", ".join(dict.fromkeys(used)) or f"layer {segment.index}")
        return names

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


def _with_advice(plan: PipelinePlan) -> PipelinePlan:
    """Return `plan` with what speaks against it."""
    advice = []
    num_stages, num_layers = len(plan.stages), len(plan.layer_names)
    chunk_s = plan.one_device_s / len(plan.chunk_rows) / num_stages
    if num_stages > 1 and plan.step_s > 0.9 * plan.one_device_s:
        advice.append("The pipeline is hardly faster than one device.")
    if num_stages > 1 and plan.graph_parallel_s < plan.step_s:
        advice.append("Graph parallelism would be faster over this link.")
    if num_layers < _FEW_LAYERS:
        advice.append(f"With {num_layers} layers graph parallelism sends little as well.")
    if chunk_s < _SHORT_CHUNK_S:
        advice.append(
            f"A chunk takes {chunk_s * 1e3:.1f} ms a stage: take fewer chunks, or one device."
        )
    return replace(plan, advice=tuple(advice))
