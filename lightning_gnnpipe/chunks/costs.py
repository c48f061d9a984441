"""Measures what each layer costs: seconds, bytes, size of histories.

All layers run on a few chunks one after the other, then back, as in a training step, so that caches
are as warm as they will be.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe.chunks.batch_inputs import BatchInputs
from lightning_gnnpipe.chunks.chunk_run import run_segments
from lightning_gnnpipe.chunks.inputs import PassInputs, PlannedInputs
from lightning_gnnpipe.chunks.zero_halo import ZeroHalo
from lightning_gnnpipe.graph import BatchPlan, ChunkPlan
from lightning_gnnpipe.layers import NativeContext, find_layers, intercept
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.stages import (
    Layers,
    Segment,
    Stage,
    part_of,
    repeat_costs,
    solve_balance,
    undisturbed,
)
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.types import ChunkView


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer's share of a training step over all nodes.

    Attributes:
        forward_s: Seconds, forward.
        backward_s: Seconds, backward.
        saved_bytes: What autograd keeps between them.
        history_bytes: Its histories and gradient buffers, where chunks see each other.
        pushed_row_bytes: Bytes of one node's row in all of its histories.
        num_pushes: Its histories: how often it pushes the rows of a chunk.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    history_bytes: int
    pushed_row_bytes: int
    num_pushes: int

    @property
    def compute_s(self) -> float:
        """Seconds, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a training step over all nodes is made of.

    Attributes:
        layers: What each layer costs.
        repeats: What it costs to compute a value again that stages can, by its name.
    """

    layers: tuple[LayerCost, ...]
    repeats: dict[str, LayerCost]

    def of(self, stage: Stage) -> list[LayerCost]:
        """Return the costs of all that `stage` computes."""
        again = [name for part in stage.repeated for name in part.outputs]
        return [
            *(self.layers[segment.index] for segment in stage.segments),
            *(self.repeats[name] for name in again),
        ]

    def assign_layers(
        self, layers: Layers, num_stages: int, repeated: Collection[str]
    ) -> tuple[int, ...]:
        """Return how many layers each stage gets for the slowest one to be as fast as possible."""
        again = {name: cost.compute_s for name, cost in self.repeats.items()}
        costs = [cost.compute_s for cost in self.layers]
        return solve_balance(costs, num_stages, repeat_costs(layers, repeated, again))


_MAX_TIMED = 3
_NUM_RUNS = 5
_LONGEST_S = 0.3  # for the runs of a chunk after the first
_MOST_ROWS = 2**17  # of a table that no cache holds


def work_of(chunk: ChunkView) -> int:
    """Return what the time of a chunk is taken to be proportional to: its rows and in-edges."""
    return chunk.num_nodes + chunk.edge_end - chunk.edge_start


def measure_layers(
    module: nn.Module,
    layers: Layers,
    plan: ChunkPlan,
    inputs: PlannedInputs,
    histories: HistoryOptions,
) -> StepCosts:
    """Return the costs of all layers, from a few runs over a few middle-sized chunks."""
    context = MessageContext(ZeroHalo(plan, histories), plan)
    context.leaves = inputs
    pieces = [(chunk, work_of(chunk)) for chunk in plan.chunks]
    timed, again = _time(module, layers, pieces, inputs, context)
    is_cut = plan.num_chunks > 1
    costs = [
        one.cost(is_cut * _history_bytes(context, segment), _pushed_row_bytes(context, segment))
        for one, segment in zip(timed, layers.segments, strict=True)
    ]
    return StepCosts(tuple(costs), {name: one.cost() for name, one in again.items()})


def measure_batch(
    module: nn.Module, layers: Layers, plan: BatchPlan, inputs: BatchInputs
) -> StepCosts:
    """Return the costs of all layers over a mini-batch of graphs; there are no histories."""
    pieces = [(chunk, chunk.work) for chunk in plan.chunks]
    context = NativeContext(1)  # BatchNorm runs as it is
    timed, again = _time(module, layers, pieces, inputs, context)
    costs = tuple(one.cost() for one in timed)
    return StepCosts(costs, {name: one.cost() for name, one in again.items()})


def _time(
    module: nn.Module,
    layers: Layers,
    pieces: Sequence[tuple[Any, int]],
    inputs: PassInputs,
    context: MessageContext | NativeContext,
) -> tuple[list[_Timed], dict[str, _Timed]]:
    """Time each layer, and each value that can be computed again, by its name.

    They are run on a few middle-sized ones of `pieces`, and scaled to all of them by work.
    """
    parts = [part_of(layers.segments[i], (name,)) for name, i in layers.repeatable.items()]
    segments = (*layers.segments, *parts)
    ranked = sorted(pieces, key=lambda piece: piece[1])
    num_timed = min(_MAX_TIMED, max(1, len(pieces) // 4))
    first = (len(ranked) - num_timed) // 2
    chosen = ranked[first : first + num_timed]
    total = sum(work for _, work in pieces)
    with (
        undisturbed(module),
        intercept(find_layers(module), context),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for chunk, _ in chosen:  # what is computed once for a chunk is no cost of a layer
            _run(layers, segments, chunk, inputs, context)
        runs = [_best_run(layers, segments, chunk, inputs, context) for chunk, _ in chosen]
    scales = [total / max(work, 1) for _, work in chosen]

    def over_chunks(values: list[float]) -> float:
        return median(value * scale for value, scale in zip(values, scales, strict=True))

    timed = [
        _Timed(
            over_chunks([run[i].forward_s for run in runs]),
            over_chunks([run[i].backward_s for run in runs]),
            over_chunks([run[i].saved_bytes for run in runs]),
        )
        for i in range(len(segments))
    ]
    _make_even(timed, [_form_of(segment, layers) for segment in segments])
    num_layers = len(layers.segments)
    return timed[:num_layers], dict(zip(layers.repeatable, timed[num_layers:], strict=True))


def _best_run(*args: Any) -> list[_Timed]:
    """Return the least times of several runs: whatever else the machine does only adds to them."""
    runs, start = [_run(*args)], time.perf_counter()
    while len(runs) < _NUM_RUNS and time.perf_counter() - start < _LONGEST_S:
        runs.append(_run(*args))
    return [
        _Timed(min(one.forward_s for one in same), min(one.backward_s for one in same), saved)
        for same in zip(*runs, strict=True)
        for saved in [same[0].saved_bytes]
    ]


def _make_even(timed: Sequence[_Timed], forms: Sequence[Hashable]) -> None:
    """Give layers that compute the same the same times, the median of theirs."""
    for form in set(forms):
        same = [one for one, other in zip(timed, forms, strict=True) if other == form]
        times = [median(one.forward_s for one in same), median(one.backward_s for one in same)]
        for one in same:
            one.forward_s, one.backward_s = times


def _form_of(segment: Segment, layers: Layers) -> Hashable:
    """Return what is equal for segments that compute the same, each with weights of its own."""
    nodes = list(segment.module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}

    def form(node: fx.Node) -> Hashable:
        known, target = layers.values.get(node.name), str(node.target)
        if node.op == "call_module":
            module = segment.module.get_submodule(target)
            shapes = [tuple(p.shape) for p in module.parameters()]
            target = f"{type(module)} {module} {_plain(module)} {shapes}"
        elif node.op == "get_attr" or (node.op == "placeholder" and known is not None):
            target = ""
        sources = tuple(place[source] for source in node.all_input_nodes)
        return node.op, target, sources, None if known is None else replace(known, edge_set=0)

    return tuple(form(node) for node in nodes)


def _plain(module: nn.Module) -> list[tuple[str, object]]:
    return [(n, v) for n, v in vars(module).items() if isinstance(v, bool | int | float | str)]


def measure_copies(num_nodes: int, costs: Sequence[LayerCost], device: torch.device) -> float:
    """Return how many bytes a second of rows can be gathered, and put down where they belong.

    Rows here and there in a table, as wide as those that the layers push at the most.
    """
    num_nodes = min(num_nodes, _MOST_ROWS)
    widest = max((cost.pushed_row_bytes // max(cost.num_pushes, 1) for cost in costs), default=0)
    table = torch.zeros((num_nodes, max(widest // 4, 1)), device=device)
    positions = torch.arange(0, num_nodes, 10, device=device)
    num_bytes = table[positions].nbytes
    times = []
    for _ in range(_MAX_TIMED):
        _synchronize(device)
        start = time.perf_counter()
        rows = table[positions]
        table[positions] = rows  # as rows are, and then as gradients are
        table.index_add_(0, positions, table[positions])
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * num_bytes / min(times)


@dataclass(slots=True)
class _Timed:
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: float = 0.0

    def cost(self, history_bytes: int = 0, pushed_row_bytes: Sequence[int] = ()) -> LayerCost:
        """Return the cost of a layer with these histories."""
        return LayerCost(
            self.forward_s,
            self.backward_s,
            round(self.saved_bytes),
            history_bytes,
            sum(pushed_row_bytes),
            len(pushed_row_bytes),
        )


def _run(
    layers: Layers,
    segments: Sequence[Segment],
    chunk: Any,
    inputs: PassInputs,
    context: MessageContext | NativeContext,
) -> list[_Timed]:
    """Run all segments over `chunk`, forward and backward, each cut off from its neighbours."""
    leaves = {name for s in segments for name in s.inputs if name.startswith("leaf_")}
    known = inputs.slice(chunk, leaves)
    timed, graphs = [_Timed() for _ in segments], []
    parameters = (p for segment in segments for p in segment.module.parameters())
    tensors = [t for t in (*known.values(), *parameters) if isinstance(t, Tensor)]
    given = {t.untyped_storage().data_ptr() for t in tensors}
    for segment, one in zip(segments, timed, strict=True):
        values = {name: _cut_off(known[name], name, layers) for name in segment.inputs}
        sources = [t for t in values.values() if isinstance(t, Tensor) and t.requires_grad]
        with _counted(one, given), _clocked(tensors, one, "forward_s"):
            run_segments((segment,), values, chunk, context)
        roots = [values[n] for n in segment.outputs if values[n].requires_grad]
        known |= {name: values[name].detach() for name in segment.outputs}
        graphs.append((roots, sources))
    for segment, one, (roots, sources) in reversed(list(zip(segments, timed, graphs, strict=True))):
        wanted = [*(p for p in segment.module.parameters() if p.requires_grad), *sources]
        if not roots or not wanted:
            continue
        grads = [torch.ones_like(root) for root in roots]
        with _clocked(tensors, one, "backward_s"):
            torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    return timed


@contextmanager
def _clocked(tensors: Sequence[Tensor], one: _Timed, attribute: str) -> Iterator[None]:
    devices = {tensor.device for tensor in tensors}
    for device in devices:
        _synchronize(device)
    start = time.perf_counter()
    yield
    for device in devices:
        _synchronize(device)
    setattr(one, attribute, time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _counted(one: _Timed, given: set[int]) -> Iterator[None]:
    """Count the bytes that autograd keeps, but for weights and the batch, at `given` places."""
    seen = set(given)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and tensor.is_floating_point():
            seen.add(storage.data_ptr())
            one.saved_bytes += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _cut_off(tensor: Any, name: str, layers: Layers) -> Any:
    known = layers.values.get(name)
    is_crossing = not name.startswith("leaf_") and known is not None and known.requires_grad
    return tensor.detach().requires_grad_() if is_crossing else tensor


def _history_bytes(context: MessageContext, segment: Segment) -> int:
    """Return the bytes of a layer's histories and gradient buffers, where the layers compute."""
    store = context.store
    assert isinstance(store, ZeroHalo)
    if not store.is_local:
        return 0
    kept = (store.table_bytes, store.grad_bytes)
    return sum(n for part in kept for key, n in part.items() if key.segment == segment.index)


def _pushed_row_bytes(context: MessageContext, segment: Segment) -> list[int]:
    store = context.store
    assert isinstance(store, ZeroHalo)
    return [n for key, n in store.pushed_row_bytes.items() if key.segment == segment.index]
