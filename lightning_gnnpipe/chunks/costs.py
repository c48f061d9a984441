"""Measures the cost of each layer: seconds, bytes that autograd saves, size of histories.

One layer after the other runs forward and backward on a middle-sized chunk, on histories of zeros
that it has to itself: the model's histories never exist together.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks.inputs import BatchInputs, PlannedInputs
from lightning_gnnpipe.chunks.step import run_segments, unread_after
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
from lightning_gnnpipe.stages import (
    Layers,
    Segment,
    Stage,
    part_of,
    repeat_costs,
    solve_balance,
    undisturbed,
)
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


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer in a training step over all nodes.

    Attributes:
        saved_bytes: Bytes that autograd keeps between forward and backward, without those that an
            earlier layer keeps as well.
        history_bytes: Bytes of its histories and gradient buffers, with more than one chunk.
        pushed: Entries of one node's row in each of its histories.
        chunk_s: Seconds that one more chunk adds; 0 if not measured.
        is_sum: Whether it sums rows with weights.
        is_rounded: Whether `history_bytes` are of rounded histories.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    history_bytes: int = 0
    pushed: tuple[int, ...] = ()
    chunk_s: float = 0.0
    is_sum: bool = False
    is_rounded: bool = False

    @property
    def compute_s(self) -> float:
        """Seconds, forward and backward."""
        return self.forward_s + self.backward_s

    def step_s(self, *, recompute: bool = False, in_chunks: bool = False) -> float:
        """Return its seconds in a training step.

        `in_chunks`: of an exact step in chunks. A chunk that waits for rows or gradients of other
        chunks runs a second time. The factors are measured, with GCN and GraphSAGE on 10,000 nodes.
        """
        if in_chunks:
            return 4 * self.forward_s + 3 * self.backward_s
        return self.compute_s + recompute * self.forward_s


@dataclass(frozen=True, slots=True)
class InputSizes:
    """A graph; bytes of arguments in memory, and by name of tensors with a row a node or edge.

    `is_mapped`: the plan lies in memory-mapped files. `is_on_host`: the layers compute on the CPU.
    """

    num_nodes: int = 0
    num_edges: int = 0
    given_bytes: int = 0
    values: Mapping[str, int] = field(default_factory=dict)
    is_mapped: bool = False
    is_on_host: bool = True


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a training step over all nodes: of layers, and of recomputing values, by name.

    They are measured in `num_chunks` chunks. `is_disturbed`: no idle machine takes such times.
    `by_all_cores`: of layers on one chunk with a thread a core; empty if not measured. `taken_s`:
    seconds that a stage spends on receiving a chunk.
    """

    layers: tuple[LayerCost, ...]
    repeats: dict[str, LayerCost]
    num_chunks: int = 1
    sizes: InputSizes = field(default_factory=InputSizes)
    is_disturbed: bool = False
    by_all_cores: tuple[LayerCost, ...] = ()
    taken_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of all layers, forward and backward."""
        return sum(one.compute_s for one in self.layers)

    def alone_s(self, *, recompute: bool) -> float:
        """Seconds of computing a step on one device with a thread a core; 0 if not measured."""
        return sum(one.step_s(recompute=recompute) for one in self.by_all_cores)

    def of(self, stage: Stage) -> list[LayerCost]:
        """Return the costs of all that `stage` computes."""
        again = [self.repeats[name] for part in stage.repeated for name in part.outputs]
        return [self.layers[segment.index] for segment in stage.segments] + again

    def assign_layers(
        self, layers: Layers, num_stages: int, repeated: Collection[str]
    ) -> tuple[int, ...]:
        """Return the number of layers of each stage that makes the slowest stage fastest."""
        again = {name: cost.compute_s for name, cost in self.repeats.items()}
        costs = [cost.compute_s for cost in self.layers]
        return solve_balance(costs, num_stages, repeat_costs(layers, repeated, again))

    def with_overhead(self, other: StepCosts) -> StepCosts:
        """Return the costs with `chunk_s`, by comparison with costs in another number of chunks.

        A layer takes `a K + b` seconds in K chunks, and neither a nor b is negative. It takes at
        least what it does in one chunk: alone, a small chunk finds its rows in the caches.
        """

        def compare(one: LayerCost, its: LayerCost) -> LayerCost:
            if other.num_chunks == 1 and its.compute_s > one.compute_s:
                return replace(one, forward_s=its.forward_s, backward_s=its.backward_s)
            chunk_s = (its.compute_s - one.compute_s) / (other.num_chunks - self.num_chunks)
            return replace(one, chunk_s=min(max(chunk_s, 0.0), one.compute_s / self.num_chunks))

        layers = tuple(map(compare, self.layers, other.layers))
        repeats = {name: compare(one, other.repeats[name]) for name, one in self.repeats.items()}
        both = ((one.num_chunks, one.compute_s) for one in (self, other))
        (few, few_s), (many, many_s) = sorted(both)
        is_disturbed = few_s > _DISTURBED * many_s or many_s / many > _DISTURBED * few_s / few
        return replace(self, layers=layers, repeats=repeats, is_disturbed=is_disturbed)

    def at(self, num_chunks: int) -> StepCosts:
        """Return the costs in `num_chunks` chunks."""
        more = num_chunks - self.num_chunks

        def scale(one: LayerCost) -> LayerCost:
            by = 1 + more * one.chunk_s / max(one.compute_s, 1e-12)
            return replace(one, forward_s=by * one.forward_s, backward_s=by * one.backward_s)

        repeats = {name: scale(one) for name, one in self.repeats.items()}
        layers = tuple(map(scale, self.layers))
        return replace(self, layers=layers, repeats=repeats, num_chunks=num_chunks)

    def step_s(self, stages: Sequence[Stage], num_chunks: int) -> float:
        """Return the seconds of computing a step on `stages` in `num_chunks` chunks."""
        costs = self.at(num_chunks)
        slowest_s = max(sum(one.compute_s for one in costs.of(stage)) for stage in stages)
        return slowest_s * (num_chunks + len(stages) - 1) / num_chunks

    def times(self, stages: Sequence[Stage], num_nodes: int) -> dict[int, float]:
        """Return `step_s` by the numbers of chunks to choose from: 1 to 16 a stage."""
        numbers = (len(stages) << power for power in range(5))
        possible = [number for number in numbers if number <= num_nodes] or [num_nodes]
        return {number: self.step_s(stages, number) for number in possible}

    def choose_num_chunks(self, stages: Sequence[Stage], num_nodes: int) -> int:
        """Return the number of chunks that is fastest on these stages.

        Of numbers that take at most 5 % longer, the smallest: its embeddings are the least stale.
        """
        taken_s = self.taken_s * (len(stages) > 1)
        times = {n: found + taken_s * n for n, found in self.times(stages, num_nodes).items()}
        return next(n for n in times if times[n] <= 1.05 * min(times.values()))


_FLOAT = re.compile(r"\d+(\.\d+(e-?\d+)?|e-?\d+)")
_MOST_RUNS = 5
_DISTURBED = 3.0  # caches save less
_TAKEN_S = 0.7e-3  # by gloo, between two processes that compute
_LONGEST_S = 0.5  # for repeated runs of all layers
_ENOUGH = 4  # layers of one form to time
_forks: list[int] = []  # this process, if it is a fork: more threads of OpenMP may wait for ever
os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))
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
) -> StepCosts:
    """Time layers in the chunks of `cut`, or in about so many, and in one.

    In large chunks one more adds no time. `is_tight`: one layer on all nodes may not fit.
    `mapped`: addresses of arguments in memory-mapped files; None if the plan is not in files.
    `shares_cores`: time the layers with a thread a core as well, as one device alone would compute.
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
    costs = {
        k: measure_layers(
            module, layers, one, call, inputs, histories, edges if one is plan else None
        )
        for k, one in cuts
    }
    found = costs[plan.num_chunks]
    if other.num_chunks != plan.num_chunks:
        found = found.with_overhead(costs[other.num_chunks])
    is_slower = inputs.edge_index.device.type == "cpu" and torch.get_num_threads() < num_cores()
    if shares_cores and is_slower and other.num_chunks == 1 and not _forks:
        with computing_with(num_cores()):
            alone = [measure_layers(module, layers, other, call, inputs, histories)]
            if alone[0].compute_s > costs[1].compute_s:  # the threads had just begun
                alone.append(measure_layers(module, layers, other, call, inputs, histories))
        best = min(alone, key=lambda one: one.compute_s)
        if best.compute_s < _DISTURBED * costs[1].compute_s:
            found = replace(found, by_all_cores=best.layers)
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


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def computing_with(num_threads: int) -> Iterator[None]:
    """Compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
) -> StepCosts:
    """Time layers, and values that stages may compute again, on a middle-sized chunk.

    Layers that differ only in the values of their weights take the same time, the median of the
    first four: later ones do not run. A batch of graphs has no histories. `edges`: of the plan, if
    training uses them as well.
    """
    store: _Zeros | None = None
    batch: BatchInputs | PlannedInputs
    context: MessageContext | NativeContext
    if isinstance(plan, BatchPlan):
        batch, context = BatchInputs(call, inputs, plan), NativeContext(1)  # plain BatchNorm
    else:
        batch, store = PlannedInputs(plan), _Zeros(plan, histories)
        batch.load(call, inputs)
        context = MessageContext(store, plan, edges)
        context.leaves = batch
    parts = [part_of(layers.segments[i], (name,)) for name, i in layers.repeatable.items()]
    segments = (*layers.segments, *parts)
    chunks: list[Any] = sorted(plan.chunks, key=lambda one: one.work)
    chunk = chunks[len(chunks) // 2]
    leaves = {name for one in segments for name in one.inputs if name.startswith("leaf_")}
    values = batch.slice(chunk, leaves)
    known, saved = set(values), dict[int, int]()  # names of what is given, or saved before
    times, held = list[NDArray[np.float64]](), list[dict[str, Any]]()
    forms, first_s = list(map(_form_of, segments)), dict[Hashable, float]()
    num_timed = sum(min(forms.count(form), _ENOUGH) for form in set(forms))
    seen, last = Counter[Hashable](), dict[Hashable, _Timed]()  # by form and shapes of inputs
    with (
        undisturbed(module),
        intercept(find_layers(module), context),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        unread_names = unread_after(segments, leaves)
        for segment, form, unread in zip(segments, forms, unread_names, strict=True):
            key = form, _places_of(segment, layers, values, known)
            seen[key] += 1
            if seen[key] > _ENOUGH:
                last[key].stand_for(segment, values, known)
                times.append(last[key].cost * (np.nan, np.nan, 1.0))
                held.append(last[key].held)
            else:
                given = [*module.parameters(), *(values[name] for name in known & values.keys())]
                run = partial(_run, segment, values, chunk, context, given, saved)
                if form not in first_s:
                    first_s[form] = run()[:2].sum()  # with what is computed once per chunk
                num_runs = max(1, int(_LONGEST_S / num_timed / first_s[form]))
                if first_s[form] < 1.0:  # s; a longer run averages over other processes' load
                    num_runs = max(num_runs, 4 - forms.count(form))  # at least three of each form
                runs = [run() for _ in range(min(num_runs, _MOST_RUNS))]
                times.append(np.min(runs, axis=0))  # load from other processes only adds time
                known |= {name for name, one in values.items() if _address(one) in saved}
                held.append({} if store is None else store.drop())
                if seen[key] == _ENOUGH:
                    last[key] = _Timed(segment, values, known, times[-1], held[-1])
            for name in unread:
                del values[name]
    found = np.array(times) * (sum(one.work for one in chunks) / max(chunk.work, 1))
    for form in set(forms):
        same = [i for i, one in enumerate(forms) if one == form]
        found[same, :2] = np.nanmedian(found[same, :2], axis=0)
    rows = zip(found.tolist(), held, strict=True)
    costs = [LayerCost(ahead, back, round(size), **more) for (ahead, back, size), more in rows]
    again = dict(zip(layers.repeatable, costs[len(layers.segments) :], strict=True))
    return StepCosts(tuple(costs[: len(layers.segments)]), again, plan.num_chunks)


class _Timed:
    """A layer that ran, and stands for later layers of its form."""

    def __init__(
        self,
        segment: Segment,
        values: Mapping[str, Any],
        known: Collection[str],
        cost: NDArray[np.float64],
        held: dict[str, Any],
    ) -> None:
        self._outputs = [values[name] for name in segment.outputs]
        self._is_known = [name in known for name in (*segment.inputs, *segment.outputs)]
        self.cost, self.held = cost, held

    def stand_for(self, segment: Segment, values: dict[str, Any], known: set[str]) -> None:
        """Give `segment` the outputs of this layer, and what this layer has saved."""
        for name, one in zip(segment.outputs, self._outputs, strict=True):
            needs_grad = _needs_grad(one)
            values[name] = one.detach().clone() if isinstance(one, Tensor) else one
            if needs_grad:
                values[name].requires_grad_()
        names = zip((*segment.inputs, *segment.outputs), self._is_known, strict=True)
        known |= {name for name, is_known in names if is_known}


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
        (name, *(tuple(p.shape) for p in part.parameters()))
        for name, part in zip(names, parts, strict=True)
    ]
    is_named = "call_function", "call_method"
    called = [str(one.target) if one.op in is_named else one.op for one in nodes]
    return tuple(called), tuple(shapes), tuple(tuple(p.shape) for p in module.parameters())


def _places_of(
    segment: Segment, layers: Layers, values: Mapping[str, Any], known: Collection[str]
) -> Hashable:
    """Return the shapes of what `segment` reads and returns, and what of it was saved before."""
    read = tuple((name in known, _shape_of(values[name])) for name in segment.inputs)
    found = map(layers.values.__getitem__, segment.outputs)
    return read, tuple((one.kind, one.row_shape, one.dtype, one.requires_grad) for one in found)


def _run(
    segment: Segment,
    values: dict[str, Any],
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
    wanted = [one for one in (*segment.module.parameters(), *local.values()) if _needs_grad(one)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        start = clock()
        run_segments((segment,), local, chunk, context)
        if store is not None:
            store.moments.after_forward()
        middle = clock()
    roots = [local[name] for name in segment.outputs if _needs_grad(local[name])]
    if roots and wanted:
        grads = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    end = clock()
    for one in given:
        saved.pop(_address(one), None)
    for name in segment.outputs:
        values[name] = local[name].detach().requires_grad_(local[name].requires_grad)
    return np.array((middle - start, end - middle, sum(saved.values())))


def _address(one: Any) -> int:
    is_dense = isinstance(one, Tensor) and one.layout is torch.strided
    return one.untyped_storage().data_ptr() if is_dense else 0


def _shape_of(one: Any) -> Hashable:
    if isinstance(one, Tensor):
        return one.shape, one.dtype, one.requires_grad
    return type(one).__name__


def _needs_grad(one: Any) -> bool:
    return isinstance(one, Tensor) and one.requires_grad


def now() -> float:
    """Return the time in seconds, once the GPU, if there is one, has computed all before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
