"""Measures the cost of each layer.

One layer after the other runs forward and backward on a middle-sized chunk, on histories of zeros
that it has to itself: the model's histories never exist together.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks.costs import InputSizes, LayerCost, StepCosts
from lightning_gnnpipe.chunks.inputs import BatchInputs, PlannedInputs
from lightning_gnnpipe.chunks.live import LiveBytes
from lightning_gnnpipe.chunks.step import run_segments, unread_after
from lightning_gnnpipe.chunks.threads import computing_with, forks, num_cores
from lightning_gnnpipe.graph import (
    BatchPlan,
    Chunk,
    ChunkPlan,
    check_graph,
    partition_nodes,
    plan_from_assignment,
    plan_micro_batches,
)
from lightning_gnnpipe.layers import NativeContext, find_layers, intercept
from lightning_gnnpipe.passing import GraphEdges, MessageContext
from lightning_gnnpipe.stages import Layers, Segment, needs_grad, part_of, place_of, undisturbed
from lightning_gnnpipe.staleness import (
    NEVER,
    GradientBuffer,
    HistoryOptions,
    HistoryStore,
    HostCopies,
    MomentStore,
    RowMoments,
    StepOrder,
)

_FLOAT = re.compile(r"\d+(\.\d+(e-?\d+)?|e-?\d+)")
_MOST_RUNS = 5
_TAKEN_S = 0.7e-3  # by gloo, between two processes that compute
_LONGEST_S = 0.5  # for repeated runs of all layers
_ENOUGH = 4  # layers of one form to time; if a run takes longer than `_LONG_S`, one
_LONG_S = 0.1  # such a run takes as long while its bytes are counted
_LARGE_WORK = 2**20  # nodes and edges of a chunk that is as fast, for each of them, as any larger


def measure_costs(
    module: nn.Module,
    layers: Layers,
    cut: ChunkPlan | BatchPlan | GraphEdges | int,
    call: Call,
    inputs: Inputs,
    histories: HistoryOptions,
    *,
    is_tight: bool = False,
    mapped: Collection[int] | None = None,
    shares_cores: bool = False,
    beside_pyg: bool = False,
) -> StepCosts:
    """Time layers in the chunks of `cut`, or in about so many, and in one.

    In large chunks one more adds no time. `is_tight`: one layer on all nodes may not fit.
    `mapped`: addresses of arguments in memory-mapped files; None if the plan is not in files.
    `shares_cores`: time the layers with a thread a core as well, as one device alone would compute.
    `beside_pyg`: as PyG alone computes them as well, on the edges of an `edge_index`; with a thread
    a core, and not on a large graph, where a message for each edge might not fit.
    """
    plan: ChunkPlan | BatchPlan
    other: ChunkPlan | BatchPlan
    edges: GraphEdges | None = None
    if isinstance(cut, GraphEdges):
        edges, cut = cut, cut.plan
    if isinstance(cut, BatchPlan):
        assert inputs.graphs is not None
        plan, other = cut, plan_micro_batches(inputs.graphs.work(), inputs.graphs.sizes, 1)
    else:
        plan = _cut(inputs, min(cut, inputs.num_nodes)) if isinstance(cut, int) else cut
        is_large = plan.num_nodes + plan.num_edges > plan.num_chunks * _LARGE_WORK
        other = plan if is_large or is_tight else plan.whole
        if other is plan and isinstance(cut, int):
            other = _cut(inputs, min(4 * cut, inputs.num_nodes))
    # Larger chunks first: as in training, smaller ones find the memory that these have freed.
    cuts = sorted({one.num_chunks: one for one in (plan, other)}.items())

    def measure(one: ChunkPlan | BatchPlan, *, is_plain: bool = False) -> StepCosts:
        own = edges if one is plan else None
        return measure_layers(module, layers, one, call, inputs, histories, own, is_plain=is_plain)

    costs = {k: measure(one) for k, one in cuts}
    found = costs[plan.num_chunks]
    if other.num_chunks != plan.num_chunks:
        found = found.with_overhead(costs[other.num_chunks])
    is_slower = inputs.edge_index.device.type == "cpu" and torch.get_num_threads() < num_cores()
    if shares_cores and is_slower and other.num_chunks == 1 and not forks:
        with computing_with(num_cores()):
            alone = [measure(other)]
            for _ in range(2):  # the threads had just begun, or the machine was busy
                if min(one.compute_s for one in alone) > costs[1].compute_s:
                    alone.append(measure(other))
        found = replace(found, by_all_cores=min(alone, key=lambda one: one.compute_s).layers)
    fewest, whole = cuts[0]
    is_small = inputs.num_nodes + sum(inputs.edge_sizes) <= _LARGE_WORK
    if beside_pyg and is_small and fewest == 1 and not is_tight and not call.matrices and not forks:
        with computing_with(num_cores()):
            found = replace(found, by_pyg=measure(whole, is_plain=True).layers)
    values = {
        name: one.row_bytes * inputs.num_rows(one.kind, one.edge_set)
        for name, one in layers.values.items()
        if one.kind in (Kind.NODE, Kind.EDGE)
    }
    is_on_host = inputs.edge_index.device.type == "cpu"
    places = frozenset(mapped or ()) if is_on_host else frozenset()
    leaves = ((leaf.untyped_storage().data_ptr(), leaf.nbytes) for leaf in call.leaves)
    sizes = InputSizes(
        inputs.num_nodes,
        sum(inputs.edge_sizes),
        sum(num_bytes for place, num_bytes in leaves if place not in places),
        values,
        is_mapped=is_on_host and mapped is not None,
        is_on_host=is_on_host,
    )
    return replace(found, sizes=sizes, taken_s=_TAKEN_S * is_on_host)


def _cut(inputs: Inputs, num_chunks: int) -> ChunkPlan:
    """Return a plan that takes no METIS."""
    edge_index, num_nodes = inputs.edge_index.cpu(), inputs.num_nodes
    check_graph(edge_index, num_nodes)
    chunks = partition_nodes(edge_index, num_nodes, num_chunks=num_chunks, method="contiguous")
    plan = plan_from_assignment(edge_index, num_nodes, chunks)
    return plan.with_edge_sets(inputs.edge_sizes).to(inputs.edge_index.device)


def measure_layers(
    module: nn.Module,
    layers: Layers,
    plan: ChunkPlan | BatchPlan,
    call: Call,
    inputs: Inputs,
    histories: HistoryOptions,
    edges: GraphEdges | None = None,
    *,
    is_plain: bool = False,
) -> StepCosts:
    """Time layers, and values that stages may compute again, on a middle-sized chunk.

    Layers that differ only in the values of their weights take the same time, the median of the
    first four, or that of the first if it is long: later ones do not run. A batch of graphs has no
    histories. `edges`: of the plan, if training uses them as well. `is_plain`: PyG's own code
    computes the layers, of one chunk.
    """
    store: _Zeros | None = None
    batch: BatchInputs | PlannedInputs
    context: MessageContext | NativeContext
    if isinstance(plan, BatchPlan):
        batch, context = BatchInputs(call, inputs, plan), NativeContext(1)  # plain BatchNorm
    else:
        batch = PlannedInputs(plan)
        batch.load(call, inputs)
        if is_plain:
            context = NativeContext(1)
        else:
            store = _Zeros(plan, histories)
            context = MessageContext(store, plan, edges)
        context.leaves = batch
    parts = [part_of(layers.segments[i], (name,)) for name, i in layers.repeatable.items()]
    segments = (*layers.segments, *parts)
    chunks: list[Any] = sorted(plan.chunks, key=lambda one: one.work)
    chunk = chunks[len(chunks) // 2]
    leaves = {name for one in segments for name in one.inputs if name.startswith("leaf_")}
    values, weights = batch.slice(chunk, leaves), list(module.parameters())
    runs = _Runs(segments, layers, values, weights, partial(_run, chunk=chunk, context=context))
    with (
        undisturbed(module),
        intercept(find_layers(module), context),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for number, unread in enumerate(unread_after(segments, leaves)):
            runs.take(number, dict if store is None else store.drop)
            for name in unread:
                del values[name]
    costs = runs.costs(sum(one.work for one in chunks) / max(chunk.work, 1))
    again = dict(zip(layers.repeatable, costs[len(layers.segments) :], strict=True))
    work = [one.work for one in chunks]
    largest = max(work) * len(work) / max(sum(work), 1)
    found = StepCosts(tuple(costs[: len(layers.segments)]), again, plan.num_chunks, largest=largest)
    if isinstance(context, MessageContext):
        found = replace(found, edges=context.edges.bytes_of(chunk))
    return found


class _Runs:
    """Layers that run one after the other, in the order of the module.

    Up to `_ENOUGH` of one form run, of long ones one; the last of these stands for later ones.
    `values`: what layers read, by name; each adds its outputs. `run`: see `_run`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        layers: Layers,
        values: dict[str, Any],
        weights: Sequence[Any],
        run: Callable[..., NDArray[np.float64]],
    ) -> None:
        self._segments, self._layers, self._values = segments, layers, values
        self._weights, self._run = weights, run
        self._known = set(values)  # names of what is given, or saved before
        self._forms = list(map(_form_of, segments))
        self._run_s = dict[Hashable, float]()  # of one run, by form
        self._seen, self._last = Counter[Hashable](), dict[Hashable, Any]()  # by form and shapes
        self._running = dict[Hashable, tuple[int, int]]()  # bytes, likewise; without gradients
        self._keys = list[tuple[Hashable, tuple[Any, Any]]]()
        self._times, self._held = list[NDArray[np.float64]](), list[dict[str, Any]]()

    def take(self, number: int, drop: Callable[[], dict[str, Any]]) -> None:
        """Time a layer, or let an equal one stand for it. `drop`: see `_Zeros`."""
        segment, form = self._segments[number], self._forms[number]
        key = form, _places_of(segment, self._layers, self._values, self._known)
        self._keys.append(key)
        if key in self._last:
            cost, held = self._stand_for(segment, key)
        else:
            cost, held = self._time(segment, form, key), drop()
            self._seen[key] += 1
            if self._seen[key] == self._enough(form) and form in self._forms[number + 1 :]:
                names = (*segment.inputs, *segment.outputs)
                outputs = [self._values[name] for name in segment.outputs]
                self._last[key] = outputs, [name in self._known for name in names], cost, held
        self._times.append(cost)
        self._held.append(held)

    def _enough(self, form: Hashable) -> int:
        """Return how many layers of a form run."""
        return 1 if self._run_s[form] > _LONG_S else _ENOUGH

    def _stand_for(self, segment: Segment, key: Hashable) -> tuple[Any, dict[str, Any]]:
        """Give `segment` the outputs of the last equal layer; return what that took."""
        outputs, are_known, cost, held = self._last[key]
        for name, one in zip(segment.outputs, outputs, strict=True):
            self._values[name] = one.detach().clone() if isinstance(one, Tensor) else one
            if needs_grad(one):
                self._values[name].requires_grad_()
        names = zip((*segment.inputs, *segment.outputs), are_known, strict=True)
        self._known |= {name for name, is_known in names if is_known}
        return cost * (np.nan, np.nan, 1.0), held

    def _time(self, segment: Segment, form: Hashable, key: Hashable) -> NDArray[np.float64]:
        """Return the least seconds of some runs, and bytes: see `_run`."""
        values, forms, saved = self._values, self._forms, dict[int, int]()
        given = [*self._weights, *(values[name] for name in self._known & values.keys())]
        run = partial(self._run, segment, values, given=given, saved=saved)
        runs = list[NDArray[np.float64]]()
        if key not in self._running:
            if form not in self._run_s:
                run()  # with what is computed once per chunk
            with LiveBytes() as ahead, torch.no_grad():
                run()
            with LiveBytes() as live:
                counted = run()
            outputs = [one for n in segment.outputs if isinstance(one := values[n], Tensor)]
            kept = sum(one.nbytes for one in outputs if place_of(one) in saved)
            made = sum(one.nbytes for one in outputs)
            # Of outputs only those that are saved count while gradients are computed.
            self._running[key] = live.most - live.now + kept, ahead.most - ahead.now + made
            if self._run_s.setdefault(form, counted[:2].sum()) > _LONG_S:
                runs.append(counted)
        run_s = self._run_s[form]
        num_timed = sum(min(forms.count(one), _ENOUGH) for one in set(forms))
        num_runs = max(1, int(_LONGEST_S / num_timed / run_s))
        if run_s < 1.0:  # a longer run averages over other processes' load
            num_alike = min(forms.count(form), self._enough(form))
            num_runs = max(num_runs, 4 - num_alike)  # at least three of each form
        runs += [run() for _ in range(min(num_runs, _MOST_RUNS) - len(runs))]
        self._known |= {name for name, one in values.items() if place_of(one) in saved}
        return np.min(runs, axis=0)  # load from other processes only adds time

    def costs(self, scale: float) -> list[LayerCost]:
        """Return the costs of all layers, `scale` times the chunk's."""
        found = np.array(self._times) * scale
        alike = [(form, [shape for _, shape in read], made) for form, (read, made) in self._keys]
        for key in alike:
            same = [i for i, one in enumerate(alike) if one == key]
            found[same, :2] = np.nanmedian(found[same, :2], axis=0)
        running = scale * np.array([self._running[key] for key in self._keys])
        rows = zip(found.tolist(), self._held, running.round().astype(int).tolist(), strict=True)
        names = "running_bytes", "evaluated_bytes"
        return [
            LayerCost(ahead, back, round(size), **more, **dict(zip(names, most, strict=True)))
            for (ahead, back, size), more, most in rows
        ]


class _OwnMoments(MomentStore):
    """Uses the first chunk's statistics as the statistics of the last step."""

    def of(self, key: Hashable, rows: Tensor) -> RowMoments:
        if key not in self.calls:
            self.keep(key, rows.detach(), None)
        self.calls[key].begin_step(StepOrder(self._num_chunks))  # each run computes its own
        return self.calls[key]


class _TimedTables(HostCopies):
    """Makes tables of zeros; `made_s`: seconds that this took. Steps find their tables made."""

    made_s = 0.0

    def table(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        start = now()
        found = super().table(shape, dtype, device).zero_()
        self.made_s += now() - start
        return found


class _Zeros(HistoryStore):
    """Histories of zeros on the device of the layers, without transfers from another one."""

    def __init__(self, plan: ChunkPlan, options: HistoryOptions) -> None:
        super().__init__(plan.num_nodes, plan.num_chunks, replace(options, device=None))
        self.copies = self.tables = _TimedTables(None, options.folder)
        self.moments = _OwnMoments(plan.num_chunks)
        self.step, self._counts = 1, options.device is None and plan.num_chunks > 1
        self._is_sum = False

    def push(self, key: Hashable, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        if key not in self:
            start, before_s = now(), self.tables.made_s
            self.load(key, rows.new_zeros(self.num_rows, *rows.shape[1:]), None, 0, NEVER)
            self.tables.made_s = before_s + now() - start
        super().push(key, chunk, rows)

    def clock(self) -> float:
        """Return the time in seconds, without that of making tables."""
        return now() - self.tables.made_s

    def add_output(
        self, key: Hashable, chunk: Chunk, grad: Tensor
    ) -> tuple[GradientBuffer, Tensor]:
        self._is_sum = True
        return super().add_output(key, chunk, grad)

    def drop(self) -> dict[str, Any]:
        """Drop all histories; return what a `LayerCost` says of them."""
        tables, num_bytes = [self.rows(key) for key in self], self.num_bytes
        if self.options.method.snapshot_steps is not None:
            num_bytes += sum(table.nbytes for table in tables)
        self._entries.clear()
        self.moments.calls.clear()
        pushed = [table[0].numel() for table in tables if table.size(0) == self.num_rows]
        is_sum, self._is_sum = self._is_sum, False
        is_rounded = any(table.itemsize == 2 for table in tables)
        found = {"history_bytes": num_bytes * self._counts, "pushed": tuple(pushed)}
        return found | {"is_sum": is_sum, "is_rounded": is_rounded}


def _form_of(segment: Segment) -> Hashable:
    """Return a key that is equal for segments that differ only in weights and other floats."""
    nodes, module = segment.module.graph.nodes, segment.module
    parts = [module.get_submodule(str(one.target)) for one in nodes if one.op == "call_module"]
    names = [_FLOAT.sub("", repr(part)) for part in parts]  # alpha=0.1, eps=1e-05
    shapes = [
        (name, *((tuple(p.shape), p.requires_grad) for p in part.parameters()))
        for name, part in zip(names, parts, strict=True)
    ]
    is_named = "call_function", "call_method"
    called = [str(one.target) if one.op in is_named else one.op for one in nodes]
    return tuple(called), tuple(shapes), tuple(tuple(p.shape) for p in module.parameters())


def _places_of(
    segment: Segment, layers: Layers, values: Mapping[str, Any], known: Collection[str]
) -> tuple[Any, Any]:
    """Return the shapes of what `segment` reads and returns, and what of it was saved before."""
    read = tuple((name in known, _shape_of(values[name])) for name in segment.inputs)
    found = map(layers.values.__getitem__, segment.outputs)
    return read, tuple((one.kind, one.row_shape, one.dtype, one.requires_grad) for one in found)


def _run(
    segment: Segment,
    values: dict[str, Any],
    *,
    chunk: Any,
    context: MessageContext | NativeContext,
    given: Sequence[Any],
    saved: dict[int, int],
) -> NDArray[np.float64]:
    """Run a layer over `chunk`, forward and backward; add its outputs, detached, to `values`.

    Returns `[3]`: seconds of forward and of backward, bytes saved in between, without `given`;
    `saved`: these by address.
    """
    saved.clear()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.is_floating_point():  # no matrix
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.nbytes)
        return tensor

    store = context.store if isinstance(context, MessageContext) else None
    clock = store.clock if isinstance(store, _Zeros) else now
    local = {name: values[name] for name in segment.inputs}
    wanted = [one for one in (*segment.module.parameters(), *local.values()) if needs_grad(one)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        start = clock()
        run_segments((segment,), local, chunk, context)
        if store is not None:
            store.moments.after_forward()
        middle = clock()
    roots = [local[name] for name in segment.outputs if needs_grad(local[name])]
    if roots and wanted and torch.is_grad_enabled():
        grads = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    end = clock()
    for one in given:
        saved.pop(place_of(one), None)
    for name in segment.outputs:
        values[name] = local[name].detach().requires_grad_(local[name].requires_grad)
    return np.array((middle - start, end - middle, sum(saved.values())))


def _shape_of(one: Any) -> Hashable:
    if isinstance(one, Tensor):
        return one.shape, one.dtype, one.requires_grad
    return type(one).__name__


def now() -> float:
    """Return the time in seconds, once the GPU, if there is one, has computed all before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
