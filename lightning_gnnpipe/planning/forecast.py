"""Forecast training before it begins: cuts, times, bytes, memory.

model -> layers, measured  |
    graph -> chunks            |> stages x shards x chunks, by closed forms -> a PipelinePlan
link speed, memory         |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import HANConv

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks import (
    LayerNames,
    PlannedInputs,
    StepCosts,
    counting_saved_bytes,
    measure_layers,
    synchronize,
)
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import (
    ChunkPlan,
    check_graph,
    edge_cut_frac,
    edges_within,
    partition_nodes,
    plan_from_assignment,
)
from lightning_gnnpipe.layers import check_support, find_convs, find_layers, without_memory
from lightning_gnnpipe.methods import flatten, raising_own_errors
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.planning.closed_forms import factorize
from lightning_gnnpipe.planning.layouts import (
    TRAINED,
    ForecastOptions,
    LayoutForecaster,
    Measured,
    bytes_of,
)
from lightning_gnnpipe.planning.pipeline_plan import PipelinePlan, choose_layout
from lightning_gnnpipe.selfcheck import check_layers
from lightning_gnnpipe.stages import (
    Layers,
    check_counts,
    check_num_stages,
    cut_module,
    find_users,
    is_listed,
    undisturbed,
)
from lightning_gnnpipe.steps import stages_of_norms

_LARGE_WORK = 2**20  # nodes and edges of a chunk that is as fast, for each of them, as any larger
_NUM_RUNS = 3


def cut_checked(
    module: nn.Module, call: Call, inputs: Inputs, strategy: StrategyOptions, *, is_cut: bool
) -> Layers:
    """Cut `module` into layers, and check them as training does."""
    with without_memory(find_convs(module)), raising_own_errors(module, call, inputs):
        repeats = bool(strategy.repeat_encoder)
        served = find_layers(module).all
        layers = cut_module(module, call, inputs, served, finds_repeatable=repeats, is_cut=is_cut)
        if strategy.self_check and (is_cut or is_listed(module)):
            check_layers(module, layers, call, inputs, on_chunks=is_cut)
    return layers


def forecast(
    module: nn.Module,
    root: nn.Module,
    call: Call,
    inputs: Inputs,
    options: ForecastOptions,
    time_loss: Callable[[Any], float],
) -> PipelinePlan:
    """Cut `module` and the graph of `call`, time each layer on a few chunks, add up a step.

    `root` is the LightningModule. `time_loss` takes an output of `module`, and returns the seconds
    of loss, metrics and backward.
    """
    strategy, num_shards = options.strategy, 1 if options.layout is None else options.layout[1]
    is_cut = options.num_chunks * num_shards > 1
    check_support(module, options.num_chunks, num_shards)
    check_graph(inputs.edge_index.cpu(), inputs.num_nodes)
    layers = cut_checked(module, call, inputs, strategy, is_cut=is_cut)
    if options.layout is not None:
        num_layers, num_stages = len(layers.segments), options.layout[0]
        if isinstance(strategy.balance, str):
            check_num_stages(num_layers, num_stages)
        else:
            check_counts(strategy.balance, num_layers, num_stages)
    edge_index = inputs.edge_index.cpu()
    assignment = partition_nodes(
        edge_index, inputs.num_nodes, num_chunks=options.num_chunks, method=strategy.partition
    )
    kept = None
    if strategy.cross_chunk_edges == "drop":
        kept = edges_within(edge_index, assignment)

    def measure(assignment: Tensor, kept: Tensor | None) -> tuple[ChunkPlan, StepCosts]:
        plan = plan_from_assignment(edge_index, inputs.num_nodes, assignment, kept=kept)
        plan = plan.with_edge_sets(inputs.edge_sizes).to(inputs.edge_index.device)
        planned = PlannedInputs(plan)
        planned.load(call, inputs)
        histories = strategy.histories.seen_from(plan.perm.device)
        return plan, measure_layers(module, layers, plan, planned, histories)

    plan, costs = measure(assignment, kept)
    large_costs, num_large = costs, -(-(inputs.num_nodes + edge_index.size(1)) // _LARGE_WORK)
    if num_large < options.num_chunks:
        _, large_costs = measure(assignment * num_large // options.num_chunks, None)
    measured = Measured(
        module=module,
        root=root,
        layers=layers,
        costs=costs,
        large_costs=large_costs,
        chunks=plan,
        assignment=assignment,
        edge_index=edge_index,
        kept_edges=edge_index if kept is None else edge_index[:, kept],
        batch_bytes=sum(leaf.nbytes for leaf in call.leaves),
        leaf_bytes={
            f"leaf_{slot}": leaf.nbytes
            for slot, leaf in enumerate(call.leaves)
            if leaf.requires_grad and slot not in call.weights
        },
        loss_s=time_loss(_blank_output(module, layers, call, inputs)),
        options=options,
    )
    return _compare(measured, _time_plain(module, call) if num_large == 1 else None)


def _time_plain(module: nn.Module, call: Call) -> tuple[float, int]:
    """Return the seconds of forward and backward as PyG runs them, and bytes of activations."""
    given = (*call.leaves, *module.parameters(), *module.buffers())
    times, saved_bytes = [], 0
    with without_memory(find_convs(module)), undisturbed(module), torch.enable_grad():
        for _ in range(1 + _NUM_RUNS):  # the first one warms up
            synchronize()
            start = time.perf_counter()
            with counting_saved_bytes(given) as saved:
                outputs = flatten(call.run(module, call.leaves))
            roots = [output for output in outputs if output.requires_grad]
            wanted = [p for p in (*module.parameters(), *call.leaves) if p.requires_grad]
            if roots and wanted:
                grads = [torch.ones_like(root) for root in roots]
                torch.autograd.grad(roots, wanted, grads, allow_unused=True)
            synchronize()
            times.append(time.perf_counter() - start)
            saved_bytes = sum(saved)
    return median(times[1:]), saved_bytes


def _blank_output(module: nn.Module, layers: Layers, call: Call, inputs: Inputs) -> Any:
    """Return zeros in the structure and shapes of the module's output."""
    tensors = [
        torch.zeros(
            (inputs.num_rows(value.kind, value.edge_set), *value.row_shape),
            dtype=value.dtype,
            device=inputs.edge_index.device,
            requires_grad=value.requires_grad,
        )
        for value in (layers.values[name] for name in layers.outputs)
    ]
    with undisturbed(module):
        return layers.rebuild_output(tensors, call.leaves)


def _compare(measured: Measured, plain: tuple[float, int] | None) -> PipelinePlan:
    """Return the plan of the requested or else the best layout, with forecasts of all layouts."""
    chunks, layers = measured.chunks, measured.layers
    made = {layout: LayoutForecaster(measured, *layout) for layout in _layouts(measured)}
    forecasts = {layout: one.forecast() for layout, one in made.items()}
    best = choose_layout(tuple(forecasts.values()))
    asked, num_chunks = measured.options.layout, measured.options.num_chunks
    layout = best.layout if asked is None else (*asked, num_chunks)
    own = forecasts[layout]
    kept_bytes = measured.batch_bytes + 2 * measured.output_bytes
    kept_bytes += TRAINED * bytes_of(measured.module.parameters())
    return PipelinePlan(
        num_nodes=chunks.num_nodes,
        num_edges=measured.edge_index.size(1),
        layer_names=tuple(map(LayerNames(measured.module).of, layers.segments)),
        layer_costs=measured.costs.layers,
        stages=tuple(made[layout].stages()),
        num_shards=own.num_shards,
        num_chunks=own.num_chunks,
        chunk_rows=tuple(chunk.num_nodes for chunk in chunks.chunks),
        chunk_edges=tuple(chunk.num_edges for chunk in chunks.chunks),
        halo_rows=tuple(chunk.num_halo for chunk in chunks.chunks),
        edge_cut_frac=edge_cut_frac(measured.edge_index, measured.assignment),
        step_s=own.step_s,
        loss_s=measured.loss_s,
        bubble_frac=own.bubble_frac,
        step_bytes=own.step_bytes,
        plain_s=None if plain is None else plain[0] + measured.loss_s,
        plain_bytes=None if plain is None else plain[1] + kept_bytes,
        layouts=tuple(forecasts.values()),
        link_gbit_per_s=measured.options.link.gbit_per_s,
        message_us=measured.options.link.message_s * 1e6,
    )


def _layouts(measured: Measured) -> list[tuple[int, int, int]]:
    """Return the (stages, shards, chunks) to compare: one device first, and the requested ones."""
    options, num_nodes = measured.options, measured.chunks.num_nodes
    num_layers = len(measured.layers.segments)
    is_whole = any(isinstance(m, HANConv) for m in measured.module.modules())
    pairs = factorize(options.num_devices, most_stages=num_layers)
    possible = [pair for pair in pairs if pair[1] <= (1 if is_whole else num_nodes)]
    possible = [pair for pair in possible if _has_own_norms(measured, pair)] or possible
    found = [(1, 1, 1), *((s, g, 1 if s == 1 else options.num_chunks) for s, g in possible)]
    if options.layout is not None:
        found.append((*options.layout, options.num_chunks))
    elif not possible:
        raise ConfigError(
            expected=f"a layout of {options.num_devices} devices with at least one layer on "
            "each stage and one node on each shard",
            found=f"{num_layers} layers that can be separated and {num_nodes} nodes",
            remedy="Use fewer devices, or a deeper model.",
        )
    return list(dict.fromkeys(found))


def _has_own_norms(measured: Measured, layout: tuple[int, int]) -> bool:
    """Whether each norm with running statistics is called by one stage only."""
    users = find_users(measured.cut(*layout), measured.module)
    return not stages_of_norms(find_layers(measured.module).norms, users)
