"""Forecast layouts of stages, shards and chunks from layers that are measured once.

model -> layers, measured  |
    graph -> chunks            |> stages x shards x chunks, by closed forms -> a PipelinePlan
link speed, memory         |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks import (
    LayerCost,
    StepCosts,
    measure_layers,
)
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import (
    ChunkPlan,
    SplitSizes,
    check_graph,
    edge_cut_frac,
    edges_within,
    measure_split,
    partition_nodes,
    plan_from_assignment,
    split_chunks,
)
from lightning_gnnpipe.layers import check_support, find_convs, find_layers, without_memory
from lightning_gnnpipe.methods import raising_own_errors
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.planning.closed_forms import (
    LayoutWork,
    Link,
    factorize,
    num_rounds,
    time_layout,
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
    check_counts,
    check_num_stages,
    choose_repeated,
    cut_module,
    find_users,
    is_listed,
    solve_balance,
    split_layers,
)
from lightning_gnnpipe.steps import stages_of_norms

_LARGE_WORK = 2**20  # nodes and edges of a chunk that is as fast, for each of them, as any larger
_MANY_ROWS = 2**10  # enough to neglect the fixed bytes of a message
_TRAINED = 4  # a weight, its gradient, two optimizer states


@dataclass(frozen=True, slots=True)
class Target:
    """What is forecast: a `call` of `module`, a part of the LightningModule `root`.

    Attributes:
        options: Of the strategy; its layout and number of chunks are ignored.
        link: Of each rank.
        memory_gib: Memory of a rank; None for no limit.
    """

    module: nn.Module
    root: nn.Module
    call: Call
    inputs: Inputs
    options: StrategyOptions
    num_chunks: int
    link: Link
    memory_gib: float | None


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
        self._assignment = assignment = partition_nodes(
            edge_index, inputs.num_nodes, num_chunks=num_chunks, method=self._options.partition
        )
        kept = None
        if self._options.cross_chunk_edges == "drop":
            kept = edges_within(edge_index, assignment)
        self._kept_edges = edge_index if kept is None else edge_index[:, kept]
        self._chunks, self._costs = self._measure(assignment, kept)
        self._whole_costs = self._costs  # of a step in one chunk
        num_large = -(-(inputs.num_nodes + edge_index.size(1)) // _LARGE_WORK)
        if num_large < num_chunks:
            self._whole_costs = self._measure(assignment * num_large // num_chunks, None)[1]
        # Of the batch, and of the outputs of all nodes with their gradient.
        self._given_bytes = _bytes_of(target.call.leaves) + 2 * self._split(1, 1).output_bytes

    def _measure(self, assignment: Tensor, kept: Tensor | None) -> tuple[ChunkPlan, StepCosts]:
        inputs, module = self._target.inputs, self._module
        plan = plan_from_assignment(self._edge_index, inputs.num_nodes, assignment, kept=kept)
        plan = plan.with_edge_sets(inputs.edge_sizes).to(inputs.edge_index.device)
        histories = self._options.histories.seen_from(plan.perm.device)
        call = self._target.call
        return plan, measure_layers(module, self._layers, plan, call, inputs, histories)

    def plan(self, num_devices: int) -> PipelinePlan:
        """Return forecasts of all layouts of the devices, and the one asked for, or the best."""
        sizes = self._layouts(num_devices)
        layouts = tuple(self.forecast(*one) for one in sizes)
        chosen = choose_layout(layouts)
        if self._asked is not None:
            chosen = layouts[sizes.index((*self._asked, self._target.num_chunks))]
        chunks = self._chunks
        return PipelinePlan(
            layout=chosen,
            layouts=layouts,
            num_nodes=chunks.num_nodes,
            num_edges=self._edge_index.size(1),
            layer_names=tuple(map(LayerNames(self._module).of, self._layers.segments)),
            layer_costs=self._costs.layers,
            chunk_rows=tuple(chunk.num_nodes for chunk in chunks.chunks),
            chunk_edges=tuple(chunk.num_edges for chunk in chunks.chunks),
            halo_rows=tuple(chunk.num_halo for chunk in chunks.chunks),
            edge_cut_frac=edge_cut_frac(self._edge_index, self._assignment),
            link=self._target.link,
        )

    def _layouts(self, num_devices: int) -> list[tuple[int, int, int]]:
        """Return the (stages, shards, chunks) to compare: one device first, and those asked for."""
        num_layers, num_chunks = len(self._layers.segments), self._target.num_chunks
        most_shards = self._chunks.num_nodes
        pairs = factorize(num_devices, most_stages=num_layers)
        possible = [pair for pair in pairs if pair[1] <= most_shards]
        possible = [pair for pair in possible if self._has_own_norms(*pair)] or possible
        found = [(1, 1, 1), *((s, g, 1 if s == 1 else num_chunks) for s, g in possible)]
        if self._asked is not None:
            found.append((*self._asked, num_chunks))
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
        target, split = self._target, self._split(num_stages, num_shards)
        sizes = self._sizes(num_shards, num_chunks)
        measured = self._whole_costs if num_chunks == 1 else self._costs
        costs = [measured.of(stage) for stage in split.stages]
        step_s, bubble_frac = time_layout(self._work(split, sizes, costs, num_chunks))
        more = 2 * int(sizes.received.sum()) * sum(map(self._halo_row_bytes, self._costs.layers))
        more += self._input_bytes(split)
        sent = split.step_bytes(target.root, get_codecs(self._options.cut_codec))
        sent = {weights: num_bytes + more for weights, num_bytes in sent.items()}
        stages = tuple(self._stages(split, sizes, costs, num_chunks))
        memory = max(stage.memory_bytes for stage in stages) + self._given_bytes
        return LayoutForecast(
            stages=stages,
            num_shards=num_shards,
            num_chunks=num_chunks,
            step_s=step_s,
            bubble_frac=bubble_frac,
            step_bytes=sent[self._options.weights],
            bytes_by_weights=sent,
            memory_bytes=memory,
            fits=target.memory_gib is None or memory <= target.memory_gib * 2**30,
        )

    def _split(self, num_stages: int, num_shards: int) -> Split:
        """Return the stages, with layers assigned as in training."""
        layers, balance = self._layers, self._options.balance
        num_layers = len(layers.segments)
        repeat = self._options.repeat_encoder
        repeated = choose_repeated(layers, repeat, self._num_rows, num_shards)
        if not isinstance(balance, str) and len(balance) == num_stages:
            counts = check_counts(balance, num_layers, num_stages)
        elif balance == "uniform":
            counts = solve_balance([1.0] * num_layers, num_stages)
        else:
            counts = self._costs.assign_layers(layers, num_stages, repeated)
        stages = split_layers(layers, counts, repeated)
        users = find_users(stages, self._module)
        return Split(self._module, layers, stages, users, num_shards, self._num_rows)

    def _num_rows(self, kind: Kind, edge_set: int) -> int:
        """Return the number of nodes, or of edges in one edge set that training reads."""
        chunks = self._chunks
        return chunks.num_nodes if kind is Kind.NODE else chunks.edge_set(edge_set).num_edges

    def _sizes(self, num_shards: int, num_chunks: int) -> SplitSizes:
        """Return the sizes of the pieces of the graph, split as in training."""
        is_one = num_chunks == 1
        assignment = torch.zeros_like(self._assignment) if is_one else self._assignment
        shards = torch.zeros_like(assignment)
        if num_shards > 1:
            shards = split_chunks(self._edge_index, assignment, num_shards)
        edges = self._edge_index if is_one else self._kept_edges
        return measure_split(edges, assignment, shards, num_shards)

    def _stages(
        self,
        split: Split,
        sizes: SplitSizes,
        costs: Sequence[Sequence[LayerCost]],
        num_chunks: int,
    ) -> Iterable[StageForecast]:
        """Forecast time and memory of each stage."""
        num_nodes, is_staged = self._chunks.num_nodes, self._options.weights == "staged"
        node_frac = float(sizes.nodes.sum(0).max()) / num_nodes
        rows = (sizes.nodes.sum(0) + sizes.received.sum(0)).max()
        is_disjoint = split.num_shards == 1 and self._chunks.is_disjoint
        has_none = is_disjoint and not find_layers(self._module).sees_all_nodes
        row_frac = 0.0 if has_none or num_chunks == 1 else float(rows) / num_nodes
        for stage, own in zip(split.stages, costs, strict=True):
            weights = split.weights_of(stage)
            held = weights if is_staged else self._module.parameters()
            activations = sum(cost.saved_bytes for cost in own)
            if self._options.recompute:
                values = [self._layers.values[name] for name in stage.received]
                activations = sum(
                    one.row_bytes * self._num_rows(one.kind, one.edge_set) for one in values
                )
            yield StageForecast(
                first_layer=stage.segments[0].index,
                num_layers=len(stage.segments),
                num_parameters=sum(p.numel() for p in weights),
                compute_s=sum(cost.compute_s for cost in own),
                memory_bytes=_TRAINED * _bytes_of(held)
                + round(row_frac * sum(cost.history_bytes for cost in own))
                + round(node_frac * activations),
            )

    def _work(
        self,
        split: Split,
        sizes: SplitSizes,
        costs: Sequence[Sequence[LayerCost]],
        num_chunks: int,
    ) -> LayoutWork:
        num_shards, num_others = split.num_shards, len(split.stages) - 1
        work = sizes.nodes + sizes.edges
        slowest, busiest = _largest_frac(work), max(map(_largest_frac, (sizes.nodes, sizes.edges)))
        rows = int(torch.maximum(sizes.sent, sizes.received).amax(1).sum())
        peers = int(sizes.peers.amax(1).sum())
        again = self._options.recompute
        compute_s = [sum(c.compute_s + again * c.forward_s for c in one) for one in costs]
        codecs = get_codecs(self._options.cut_codec)
        cuts = [split.cut_bytes(stage, codecs) for stage in split.stages[:-1]]
        ring = 2 * (num_shards - 1) / num_shards  # all-reduce over the shards
        copies = 0 if self._options.weights == "staged" else num_others
        return LayoutWork(
            num_chunks=num_chunks,
            compute_s=[slowest * one for one in compute_s],
            halo_bytes=[2 * rows * sum(map(self._halo_row_bytes, one)) for one in costs],
            num_messages=[2 * peers * sum(len(cost.pushed) for cost in one) for one in costs],
            cut_bytes=[busiest * sum(both) for both in cuts],
            link=self._target.link,
            weight_bytes=(ring + copies) * max(map(_bytes_of, map(split.weights_of, split.stages))),
            output_bytes=split.output_bytes,
            num_rounds=num_rounds(len(split.stages) * num_shards),
            waits_for_halo=not self._options.async_halo,
        )

    def _halo_row_bytes(self, cost: LayerCost) -> int:
        """Return the encoded bytes of a layer's row, mean of both directions; approximate."""
        codecs, shape = get_codecs(self._options.halo_codec), (_MANY_ROWS, sum(cost.pushed))
        num_bytes = sum(codec.payload_bytes(shape, torch.float32) for codec in codecs)
        return num_bytes // (len(codecs) * _MANY_ROWS)

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
        if options.self_check and (is_cut or is_listed(module)):
            check_layers(module, layers, call, inputs, on_chunks=is_cut)
    return layers


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


def _largest_frac(counts: Tensor) -> float:
    """Return the share of the largest shard, over all chunks, of `[num_chunks, num_shards]`."""
    return float(counts.amax(1).sum()) / max(int(counts.sum()), 1)
