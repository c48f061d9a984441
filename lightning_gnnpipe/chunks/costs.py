"""Measures the cost of each layer: seconds, bytes that autograd saves, size of histories.

All layers run forward, then backward, on a few chunks: caches are as warm as in a training step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from lightning_gnnpipe.chunks.chunk_run import run_segments
from lightning_gnnpipe.chunks.inputs import BatchInputs, PassInputs, PlannedInputs
from lightning_gnnpipe.chunks.zero_halo import ZeroHalo
from lightning_gnnpipe.graph import BatchPlan, Chunk, ChunkPlan
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


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer in a training step over all nodes.

    Attributes:
        saved_bytes: Bytes that autograd keeps between forward and backward.
        history_bytes: Bytes of its histories and gradient buffers, with more than one chunk.
        pushed_row_bytes: Bytes of one node's row in all of its histories.
        num_pushes: Number of its histories.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    history_bytes: int = 0
    pushed_row_bytes: int = 0
    num_pushes: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a training step over all nodes: of layers, and of recomputing values, by name."""

    layers: tuple[LayerCost, ...]
    repeats: dict[str, LayerCost]

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


_MAX_TIMED = 3
_NUM_RUNS = 5
_LONGEST_S = 0.3  # time for repeated runs of a chunk
_MOST_ROWS = 2**17  # a table that exceeds all caches


def work_of(chunk: Chunk) -> int:
    """Return rows plus in-edges of a chunk, which its time is assumed to be proportional to."""
    return chunk.num_nodes + chunk.edge_end - chunk.edge_start


def measure_layers(
    module: nn.Module,
    layers: Layers,
    plan: ChunkPlan,
    inputs: PlannedInputs,
    histories: HistoryOptions,
) -> StepCosts:
    """Measure all layers, in a few runs over a few middle-sized chunks."""
    store = ZeroHalo(plan, histories)
    context = MessageContext(store, plan)
    context.leaves = inputs
    pieces = [(chunk, work_of(chunk)) for chunk in plan.chunks]
    found = _measure(module, layers, pieces, inputs, context)
    costs = []
    for cost, segment in zip(found.layers, layers.segments, strict=True):
        kept = store.history_bytes(segment.index) if plan.num_chunks > 1 else 0
        rows = store.row_bytes(segment.index)
        pushes = {"pushed_row_bytes": sum(rows), "num_pushes": len(rows)}
        costs.append(replace(cost, history_bytes=kept, **pushes))
    return replace(found, layers=tuple(costs))


def measure_batch(
    module: nn.Module, layers: Layers, plan: BatchPlan, inputs: BatchInputs
) -> StepCosts:
    """Measure all layers on a batch of graphs, which has no histories."""
    pieces = [(chunk, chunk.work) for chunk in plan.chunks]
    return _measure(module, layers, pieces, inputs, NativeContext(1))  # BatchNorm runs unchanged


def _measure(
    module: nn.Module,
    layers: Layers,
    pieces: Sequence[tuple[Any, int]],
    inputs: PassInputs,
    context: MessageContext | NativeContext,
) -> StepCosts:
    """Time layers, and recomputable values, on a few middle-sized pieces (chunk, work)."""
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
        for chunk, _ in chosen:  # do not time what is computed once per chunk
            _run(layers, segments, chunk, inputs, context)
        runs = [
            _best_run(layers, segments, chunk, inputs, context) * (total / max(work, 1))
            for chunk, work in chosen
        ]
    times = np.median(runs, axis=0)
    forms = [_form_of(segment, layers) for segment in segments]
    for form in set(forms):  # layers of one form take the same time
        same = [i for i, one in enumerate(forms) if one == form]
        times[same, :2] = np.median(times[same, :2], axis=0)
    costs = [LayerCost(ahead, back, round(saved)) for ahead, back, saved in times.tolist()]
    again = zip(layers.repeatable, costs[len(layers.segments) :], strict=True)
    return StepCosts(tuple(costs[: len(layers.segments)]), dict(again))


def _best_run(*args: Any) -> NDArray[np.float64]:
    """Return the minimum times of several runs: load from other processes only adds time."""
    runs, start = [_run(*args)], time.perf_counter()
    while len(runs) < _NUM_RUNS and time.perf_counter() - start < _LONGEST_S:
        runs.append(_run(*args))
    return np.min(runs, axis=0)


def _form_of(segment: Segment, layers: Layers) -> Hashable:
    """Return a key that is equal for segments that differ only in the values of their weights."""
    nodes = list(segment.module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}

    def form(node: fx.Node) -> Hashable:
        known, target = layers.values.get(node.name), str(node.target)
        if node.op == "call_module":
            module = segment.module.get_submodule(target)
            shapes = [tuple(p.shape) for p in module.parameters()]
            plain = [v for v in vars(module).items() if isinstance(v[1], bool | int | float | str)]
            target = f"{type(module)} {module} {plain} {shapes}"
        elif node.op == "get_attr" or (node.op == "placeholder" and known is not None):
            target = ""
        sources = tuple(place[source] for source in node.all_input_nodes)
        return node.op, target, sources, None if known is None else replace(known, edge_set=0)

    return tuple(form(node) for node in nodes)


def measure_copies(num_nodes: int, costs: Sequence[LayerCost], device: torch.device) -> float:
    """Return bytes per second of gathering scattered rows, as wide as any pushed, and writing."""
    num_nodes = min(num_nodes, _MOST_ROWS)
    widest = max((cost.pushed_row_bytes // max(cost.num_pushes, 1) for cost in costs), default=0)
    table = torch.zeros((num_nodes, max(widest // 4, 1)), device=device)
    positions = torch.arange(0, num_nodes, 10, device=device)
    num_bytes = table[positions].nbytes
    times = []
    for _ in range(_MAX_TIMED):
        synchronize(device)
        start = time.perf_counter()
        rows = table[positions]
        table[positions] = rows  # like a push of rows; the next line is like gradients
        table.index_add_(0, positions, table[positions])
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * num_bytes / min(times)


def _run(
    layers: Layers,
    segments: Sequence[Segment],
    chunk: Any,
    inputs: PassInputs,
    context: MessageContext | NativeContext,
) -> NDArray[np.float64]:
    """Run all segments over `chunk`, forward and backward, each detached from its neighbours.

    Returns `[num_segments, 3]`: seconds of forward and of backward, bytes saved in between.
    """
    leaves = {name for s in segments for name in s.inputs if name.startswith("leaf_")}
    known = inputs.slice(chunk, leaves)
    timed, graphs = np.zeros((len(segments), 3)), []
    parameters = (p for segment in segments for p in segment.module.parameters())
    tensors = [t for t in (*known.values(), *parameters) if isinstance(t, Tensor)]
    devices = {tensor.device for tensor in tensors}

    def now() -> float:
        for device in devices:
            synchronize(device)
        return time.perf_counter()

    for i, segment in enumerate(segments):
        values = {name: _cut_off(known[name], name, layers) for name in segment.inputs}
        sources = [t for t in values.values() if isinstance(t, Tensor) and t.requires_grad]
        with counting_saved_bytes(tensors) as saved:
            start = now()
            run_segments((segment,), values, chunk, context)
            timed[i, 0] = now() - start
        timed[i, 2] = sum(saved)
        roots = [values[n] for n in segment.outputs if values[n].requires_grad]
        known |= {name: values[name].detach() for name in segment.outputs}
        trained = [p for p in segment.module.parameters() if p.requires_grad]
        graphs.append((roots, trained + sources))
    for i, (roots, wanted) in reversed(list(enumerate(graphs))):
        if roots and wanted:
            grads = [torch.ones_like(root) for root in roots]
            start = now()
            torch.autograd.grad(roots, wanted, grads, allow_unused=True)
            timed[i, 1] = now() - start
    return timed


def synchronize(device: torch.device | None = None) -> None:
    """Wait for the GPU `device`; None for the current GPU, if there is one."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def counting_saved_bytes(given: Iterable[Tensor]) -> Iterator[list[int]]:
    """Yield the bytes of each tensor that autograd saves within the block, except `given`."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in given}
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:  # a matrix that is an argument
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and tensor.is_floating_point():
            seen.add(storage.data_ptr())
            saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _cut_off(tensor: Any, name: str, layers: Layers) -> Any:
    known = layers.values.get(name)
    is_crossing = not name.startswith("leaf_") and known is not None and known.requires_grad
    return tensor.detach().requires_grad_() if is_crossing else tensor
