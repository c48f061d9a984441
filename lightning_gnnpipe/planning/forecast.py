"""Forecast layouts of stages, shards and chunks from layers that are measured once.

model -> layers, measured  |
    graph -> chunks            |> stages x shards x chunks, by closed forms -> a PipelinePlan
link speed, memory         |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks import (
    GIB,
    LayerCost,
    Setting,
    StepCosts,
    choose_setting,
    measure_costs,
    num_cores,
    predict_peaks,
    settings_of,
    weight_bytes,
)
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import (
    BatchPlan,
    ChunkPlan,
    SplitSizes,
    check_graph,
    edge_cut_frac,
    measure_split,
    partition_nodes,
    plan_from_assignment,
    split_chunks,
)
from lightning_gnnpipe.layers import check_support, find_convs, find_layers, without_memory
from lightning_gnnpipe.methods import raising_own_errors
from lightning_gnnpipe.options import RunOptions, StrategyOptions
from lightning_gnnpipe.planning.closed_forms import (
    LayoutWork,
    Link,
    factorize,
    num_rounds,
    time_layout,
    usual_link,
)
from lightning_gnnpipe.planning.pipeline_plan import (
    LayoutForecast,
    PipelinePlan,
    StageForecast,
    choose_layout,
)
from lightning_gnnpipe.report import LayerNames, Split
from lightning_gnnpipe.selfcheck import check_layers
from lightning_gnnpipe.stages import (
    Layers,
    Stage,
    check_counts,
    check_num_stages,
    choose_repeated,
    cut_module,
    find_users,
    solve_balance,
    split_layers,
)
from lightning_gnnpipe.steps import stages_of_norms
from lightning_gnnpipe.types import Partition

_MANY_ROWS = 2**10  # enough to neglect the fixed bytes of a message


@dataclass(frozen=True, slots=True)
class Target:
    """What is forecast: a `call` of `module`, a part of the LightningModule `root`.

    Attributes:
        options: Of the strategy; its layout is ignored.
        num_chunks: Chunks, or with "auto" those that layers are measured in.
        link: Of each rank.
        is_one_machine: Whether the ranks share the cores of this machine.
        memory_gib: Memory of a rank; None for no limit.
        mapped: See `measure_costs`.
    """

    module: nn.Module
    root: nn.Module
    call: Call
    inputs: Inputs
    options: StrategyOptions
    num_chunks: int
    link: Link
    is_one_machine: bool
    memory_gib: float | None
    mapped: Collection[int] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The graph in chunks: the chunk of each node, the plan."""

    assignment: Tensor
    plan: ChunkPlan

    def num_rows(self, kind: Kind, edge_set: int) -> int:
        """Return the number of nodes, or of edges in one edge set."""
        plan = self.plan
        return plan.num_nodes if kind is Kind.NODE else plan.edge_set(edge_set).num_edges


class Forecaster:
    """Cuts and times the target once, and forecasts any layout; `asked`: stages and shards."""

    def __init__(self, target: Target, asked: tuple[int, int] | None) -> None:
        self._target, self._options, self._module = target, target.options, target.module
        inputs, num_chunks, self._asked = target.inputs, target.num_chunks, asked
        num_stages, num_shards = asked or (1, 1)
        self._edge_index = edge_index = inputs.edge_index.cpu()
        check_support(target.module, num_chunks, num_shards)
        check_graph(edge_index, inputs.num_nodes)
        self._layers = _cut_checked(target, is_cut=num_chunks * num_shards > 1)
        if asked is not None:
            num_layers, balance = len(self._layers.segments), self._options.balance
            check_num_stages(num_layers, num_stages)
            if not isinstance(balance, str):
                check_counts(balance, num_layers, num_stages)
        self._cuts: dict[int, _Cut] = {}
        cut: ChunkPlan | int = num_chunks
        if not self._options.has_free_chunks:
            cut = self._cut(num_chunks).plan
        histories = self._options.histories.seen_from(inputs.edge_index.device)
        self._costs = measure_costs(
            target.module,
            self._layers,
            cut,
            target.call,
            inputs,
            histories,
            is_tight=target.memory_gib is not None or self._options.exact_in_chunks,
            mapped=target.mapped,
            shares_cores=True,
            beside_pyg=not _has_caches(target.module),
        )

    def _cut(self, num_chunks: int) -> _Cut:
        """Return the graph in so many chunks, cut as in training."""
        if num_chunks not in self._cuts:
            edges, inputs = self._edge_index, self._target.inputs
            method: Partition = self._options.partition if num_chunks > 1 else "contiguous"
            assignment = partition_nodes(
                edges, inputs.num_nodes, num_chunks=num_chunks, method=method
            )
            plan = plan_from_assignment(edges, inputs.num_nodes, assignment)
            plan = plan.with_edge_sets(inputs.edge_sizes).to(inputs.edge_index.device)
            self._cuts[num_chunks] = _Cut(assignment, plan)
        return self._cuts[num_chunks]

    def _choose(self, num_stages: int, num_shards: int, num_chunks: int | None = None) -> Setting:
        """Return the options and the number of chunks that training takes, if that is not given."""
        options, gib = self._options, self._target.memory_gib
        if num_shards > 1:
            options, gib = replace(options, memory_gib=None), None
        stages, run = self._split(num_stages, num_shards).stages, RunOptions(options, num_stages)
        settings = settings_of(run, stages, self._costs)
        if num_chunks is not None:
            settings = [(one, num_chunks) for one in options.savings()]
        if gib is None:
            return settings[0]
        weights = weight_bytes(self._target.root, self._module, stages, options.weights)
        predict = partial(predict_peaks, weights, stages, self._costs)
        return choose_setting(settings, predict, gib * GIB)[0]

    def _count_chunks(self, num_stages: int, num_shards: int) -> int:
        return self._choose(num_stages, num_shards)[1]

    def plan(self, num_devices: int) -> PipelinePlan:
        """Return forecasts of all layouts of the devices, and the one asked for, or the best."""
        sizes, inputs = self._layouts(num_devices), self._target.inputs
        layouts = tuple(self.forecast(*one) for one in sizes)
        chosen, num_nodes = choose_layout(layouts), inputs.num_nodes
        if self._asked is not None:
            chosen = layouts[sizes.index((*self._asked, self._count_chunks(*self._asked)))]
        cut, split = self._cut(chosen.num_chunks), self._split(chosen.num_stages, chosen.num_shards)
        chunks, times = cut.plan, dict[int, float]()
        if chosen.num_stages > 1:
            times = self._costs.times(split.stages, num_nodes)
            times = {chosen.num_chunks: self._costs.step_s(split.stages, chosen.num_chunks)} | times
        return PipelinePlan(
            layout=chosen,
            layouts=layouts,
            num_nodes=num_nodes,
            num_edges=self._edge_index.size(1),
            layer_names=tuple(map(LayerNames(self._module).of, self._layers.segments)),
            layer_costs=self._costs.at(chosen.num_chunks).layers,
            chunk_rows=tuple(chunk.num_nodes for chunk in chunks.chunks),
            chunk_edges=tuple(chunk.num_edges for chunk in chunks.chunks),
            halo_rows=tuple(chunk.num_halo for chunk in chunks.chunks),
            edge_cut_frac=edge_cut_frac(self._edge_index, cut.assignment),
            link=self._target.link,
            chunk_times=times,
            by_all_cores=self._costs.alone_s(
                recompute=layouts[0].saved.get("recompute", self._options.recompute)
            ),
            by_pyg=sum(one.compute_s for one in self._costs.by_pyg),
        )

    def _layouts(self, num_devices: int) -> list[tuple[int, int, int]]:
        """Return the (stages, shards, chunks) to compare: one device first, and those asked for."""
        num_layers, most_shards = len(self._layers.segments), self._target.inputs.num_nodes
        pairs = factorize(num_devices, most_stages=num_layers)
        possible = [pair for pair in pairs if pair[1] <= most_shards]
        possible = [pair for pair in possible if self._has_own_norms(*pair)] or possible
        found = [
            (1, 1, 1),
            *((s, g, 1 if s == 1 else self._count_chunks(s, g)) for s, g in possible),
        ]
        if self._asked is not None:
            found.append((*self._asked, self._count_chunks(*self._asked)))
        elif not possible:
            raise ConfigError(
                expected=f"a layout of {num_devices} devices with at least one layer on "
                "each stage and one node on each shard",
                found=f"{num_layers} layers that can be separated and {most_shards} nodes",
                remedy="Use fewer devices, or a deeper model.",
            )
        return list(dict.fromkeys(found))

    def _has_own_norms(self, num_stages: int, num_shards: int) -> bool:
        """Whether each norm with running statistics is called by one stage only."""
        users = self._split(num_stages, num_shards).users
        return not stages_of_norms(find_layers(self._module).norms, users)

    def forecast(self, num_stages: int, num_shards: int, num_chunks: int) -> LayoutForecast:
        """Add up the time, the bytes and the memory of a step in a layout."""
        target, cut = self._target, self._cut(num_chunks)
        setting = self._choose(num_stages, num_shards, num_chunks)
        split = replace(self._split(num_stages, num_shards), num_rows=cut.num_rows)
        shards = torch.zeros_like(cut.assignment)
        if num_shards > 1:
            shards = split_chunks(self._edge_index, cut.assignment, num_shards)
        sizes = measure_split(self._edge_index, cut.assignment, shards, num_shards)
        measured = self._costs.at(num_chunks)
        device = target.inputs.edge_index.device
        ranks = ranks_at_once(device) if target.is_one_machine else math.inf
        work = _work(split, sizes, measured, setting[0], target.link, ranks)
        step_s, bubble_frac = time_layout(work)
        halo_row_bytes = sum(_halo_row_bytes(one, self._options) for one in measured.layers)
        more = 2 * int(sizes.received.sum()) * halo_row_bytes
        more += self._input_bytes(split)
        sent = split.step_bytes(target.root, get_codecs(self._options.cut_codec))
        sent = {weights: num_bytes + more for weights, num_bytes in sent.items()}
        stages = tuple(self._stages(split, sizes, measured, setting))
        memory = max(stage.memory_bytes for stage in stages)
        return LayoutForecast(
            stages=stages,
            num_shards=num_shards,
            num_chunks=num_chunks,
            step_s=step_s,
            bubble_frac=bubble_frac,
            step_bytes=sent[self._options.weights],
            bytes_by_weights=sent,
            memory_bytes=memory,
            fits=target.memory_gib is None or memory <= target.memory_gib * GIB,
            saved=setting[0].saved_beside(self._options),
        )

    def _split(self, num_stages: int, num_shards: int) -> Split:
        """Return the stages, with layers assigned as in training."""
        layers, balance, repeat = self._layers, self._options.balance, self._options.repeat_encoder
        num_layers, num_rows = len(layers.segments), self._target.inputs.num_rows
        repeated = choose_repeated(layers, repeat, num_rows, num_shards)
        if not isinstance(balance, str) and len(balance) == num_stages:
            counts = check_counts(balance, num_layers, num_stages)
        elif balance == "uniform":
            counts = solve_balance([1.0] * num_layers, num_stages)
        else:
            counts = self._costs.assign_layers(layers, num_stages, repeated)
        stages = split_layers(layers, counts, repeated)
        users = find_users(stages, self._module)
        return Split(self._module, layers, stages, users, num_shards, num_rows)

    def _stages(
        self,
        split: Split,
        sizes: SplitSizes,
        measured: StepCosts,
        setting: Setting,
    ) -> Iterable[StageForecast]:
        """Forecast time and memory of each stage."""
        num_nodes = self._target.inputs.num_nodes
        node_frac = float(sizes.nodes.sum(0).max()) / num_nodes
        rows = (sizes.nodes.sum(0) + sizes.received.sum(0)).max()
        fracs = node_frac, float(rows) / num_nodes
        root, held = self._target.root, setting[0].weights
        weights = weight_bytes(root, self._module, split.stages, held)
        peaks = predict_peaks(weights, split.stages, measured, setting, *fracs)
        for stage, peak in zip(split.stages, peaks, strict=True):
            yield StageForecast(
                first_layer=stage.segments[0].index,
                num_layers=len(stage.segments),
                num_parameters=sum(p.numel() for p in split.weights_of(stage)),
                compute_s=_compute_s(split, stage, measured, setting[0]),
                memory_bytes=peak,
            )

    def _input_bytes(self, split: Split) -> int:
        """Return the bytes of gradients of arguments: copies of one stage's, or a sum over all."""
        num_stages, num_shards, total = len(split.stages), split.num_shards, 0
        call = self._target.call
        for slot, leaf in enumerate(call.leaves):
            num_readers = sum(f"leaf_{slot}" in stage.leaves for stage in split.stages)
            if leaf.requires_grad and slot not in call.weights and num_readers:
                copies = (num_stages - 1) * num_shards + 2 * (num_shards - 1)
                sums = 2 * (num_stages * num_shards - 1)
                total += leaf.nbytes * (sums if num_readers > 1 else copies)
        return total


def _cut_checked(target: Target, *, is_cut: bool) -> Layers:
    """Cut the module into layers, and check them as training does."""
    module, call, inputs, options = target.module, target.call, target.inputs, target.options
    with without_memory(find_convs(module)), raising_own_errors(module, call, inputs):
        repeats, served = bool(options.repeat_encoder), find_layers(module).all
        layers = cut_module(module, call, inputs, served, finds_repeatable=repeats, is_cut=is_cut)
        if options.self_check:
            check_layers(module, layers, call, inputs, on_chunks=is_cut)
    return layers


def _has_caches(module: nn.Module) -> bool:
    """Whether PyG would compute some values once that are timed in each run."""
    return any(getattr(conv, "cached", False) for conv in find_convs(module).values())


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


def _largest_frac(counts: Tensor) -> float:
    """Return the share of the largest shard, over all chunks, of `[num_chunks, num_shards]`."""
    return float(counts.amax(1).sum()) / max(int(counts.sum()), 1)


def expect_steps(
    split: Split,
    costs: StepCosts,
    inputs: Inputs,
    options: StrategyOptions,
    cut: ChunkPlan | BatchPlan,
    num_ranks: float,
) -> dict[tuple[int, int, int], float]:
    """Return the seconds of a step by stages, shards and chunks: of a run without shards first.

    Then of one device with one chunk, and of graph parallelism, whose shards are runs of chunks.
    `num_ranks`: those that compute at the same time.
    """
    link = usual_link(is_gloo=inputs.edge_index.device.type == "cpu")
    num_stages, num_chunks = len(split.stages), cut.num_chunks
    stages = split_layers(split.layers, (len(split.layers.segments),))
    whole = replace(split, stages=stages, users=find_users(stages, split.module))
    layouts: list[tuple[Split, int, SplitSizes | None]] = [
        (split, num_chunks, None),
        (whole, 1, None),
    ]
    is_whole = options.weights == "whole"  # else this rank does not know what weights are summed
    if isinstance(cut, ChunkPlan) and num_chunks >= num_stages and is_whole:
        shards = torch.empty(inputs.num_nodes, dtype=torch.int64)
        shards[cut.perm.cpu()] = cut.chunk_of_position().cpu() * num_stages // num_chunks
        edges = inputs.edge_index.cpu()
        sizes = measure_split(edges, torch.zeros_like(shards), shards, num_stages)
        layouts.append((replace(whole, num_shards=num_stages), 1, sizes))
    found = {}
    for one, number, pieces in layouts:
        work = _work(one, pieces, costs.at(number), options, link, num_ranks)
        found[len(one.stages), one.num_shards, number] = time_layout(work)[0]
    return found


def _work(
    split: Split,
    sizes: SplitSizes | None,
    costs: StepCosts,
    options: StrategyOptions,
    link: Link,
    num_ranks: float,
) -> LayoutWork:
    """Add up the work of a step; `sizes`: of the pieces of several shards."""
    num_shards, num_others = split.num_shards, len(split.stages) - 1
    slowest, busiest, rows, peers = 1.0, 1.0, 0, 0
    num_sums = [0] * len(split.stages)  # of norms over all nodes, with two messages a round
    if sizes is not None:
        per_norm = 3 * (1 + options.recompute) if costs.num_chunks == 1 else 2 * costs.num_chunks
        num_sums = [per_norm * one for one in _count_norms(split)]
        work = sizes.nodes + sizes.edges
        slowest, busiest = _largest_frac(work), max(map(_largest_frac, (sizes.nodes, sizes.edges)))
        rows = int(torch.maximum(sizes.sent, sizes.received).amax(1).sum())
        peers = int(sizes.peers.amax(1).sum())
    of_stages = list(map(costs.of, split.stages))
    compute_s = [_compute_s(split, stage, costs, options) for stage in split.stages]
    codecs = get_codecs(options.cut_codec)
    cuts = [split.cut_bytes(stage, codecs) for stage in split.stages[:-1]]
    ring = 2 * (num_shards - 1) / num_shards  # all-reduce over the shards
    copies = 0 if options.weights == "staged" else num_others
    return LayoutWork(
        num_chunks=costs.num_chunks,
        compute_s=[slowest * one for one in compute_s],
        halo_bytes=[2 * rows * sum(_halo_row_bytes(c, options) for c in one) for one in of_stages],
        num_messages=[
            2 * peers * sum(len(cost.pushed) for cost in one) + 2 * num_rounds(num_shards) * sums
            for one, sums in zip(of_stages, num_sums, strict=True)
        ],
        cut_bytes=[busiest * sum(both) for both in cuts],
        link=link,
        weight_bytes=(ring + copies) * max(map(_bytes_of, map(split.weights_of, split.stages))),
        output_bytes=split.output_bytes,
        num_rounds=num_rounds(len(split.stages) * num_shards),
        waits_for_halo=not options.async_halo,
        taken_s=costs.taken_s,
        stages_at_once=num_ranks / num_shards,
    )


def _compute_s(split: Split, stage: Stage, costs: StepCosts, options: StrategyOptions) -> float:
    """Return the seconds of computing a step on a stage; on one device all steps may be exact."""
    is_alone = len(split.stages) * split.num_shards == 1
    in_chunks = options.exact_in_chunks and is_alone and costs.num_chunks > 1
    again = {"recompute": options.recompute, "in_chunks": in_chunks}
    return sum(one.step_s(**again) for one in costs.of(stage))


def ranks_at_once(device: torch.device, num_hosts: int = 1) -> float:
    """Return how many ranks with so many threads compute at the same time on hosts like this."""
    threads = torch.get_num_threads()
    cores = max(num_cores(), threads)
    return num_hosts * cores / threads if device.type == "cpu" else math.inf


def _count_norms(split: Split) -> list[int]:
    """Return for each stage the norms that sum over all nodes."""
    found = find_layers(split.module).norms.values()
    norms = {id(one) for one in found if not isinstance(one, gnn.BatchNorm | gnn.GraphSizeNorm)}
    return [
        sum(id(part) in norms for segment in stage.segments for part in segment.module.modules())
        for stage in split.stages
    ]


def _halo_row_bytes(cost: LayerCost, options: StrategyOptions) -> int:
    """Return the encoded bytes of a layer's row, mean of both directions; approximate."""
    codecs, shape = get_codecs(options.halo_codec), (_MANY_ROWS, sum(cost.pushed))
    num_bytes = sum(codec.payload_bytes(shape, torch.float32) for codec in codecs)
    return num_bytes // (len(codecs) * _MANY_ROWS)
