"""Measures the cost of each layer: seconds, bytes that autograd saves, size of histories.

One layer after the other runs forward and backward on a few chunks, on histories of zeros that it
has to itself: the model's histories never exist together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from lightning_gnnpipe.chunks.inputs import BatchInputs, PassInputs, PlannedInputs
from lightning_gnnpipe.chunks.step import run_segments
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
from lightning_gnnpipe.staleness import HistoryOptions, HistoryStore, MomentStore, RowMoments


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
_LONGEST_S = 0.3  # time for repeated runs of all layers on a chunk


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
    context = MessageContext(_Zeros(plan, histories), plan)
    context.leaves = inputs
    pieces = [(chunk, work_of(chunk)) for chunk in plan.chunks]
    return _measure(module, layers, pieces, inputs, context)


class _OwnMoments(RowMoments):
    """Uses the first chunk's statistics as the statistics of the last step."""

    def sums_of(self, rows: Tensor) -> Tensor:
        if self.total is None:
            dtype = torch.promote_types(rows.dtype, torch.float32)
            self.center = rows.new_zeros(rows.size(1), dtype=dtype)
            self.set([None] * self.num_chunks, super().sums_of(rows))
        return super().sums_of(rows)


class _Zeros(HistoryStore):
    """Histories of zeros on the device of the layers, without transfers from another one."""

    def __init__(self, plan: ChunkPlan, options: HistoryOptions) -> None:
        super().__init__(plan.num_nodes, plan.num_chunks, replace(options, device=None))
        self.is_local = options.device is None
        self.moments = MomentStore(plan.num_chunks, _OwnMoments)
        self.row_bytes: dict[Hashable, int] = {}  # of one node

    def push(self, key: Hashable, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        entry = self._entry(key, rows)
        if not entry.is_filled:
            entry.rows.zero_()
            entry.is_filled = True
            if self.num_rows > self.num_chunks:
                self.row_bytes[key] = rows[:1].nbytes
        super().push(key, chunk, rows)

    def empty(self) -> dict[str, int]:
        """Drop all histories; return what a `LayerCost` says of them."""
        copies = 1 if self.options.method.snapshot_steps is None else 2
        held = [copies * one.rows.nbytes + one.grads.num_bytes for one in self._entries.values()]
        kept = sum(held) if self.is_local and self.num_chunks > 1 else 0
        rows = list(self.row_bytes.values())
        self._entries.clear()
        self.row_bytes.clear()
        return {"history_bytes": kept, "pushed_row_bytes": sum(rows), "num_pushes": len(rows)}


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
    share = [sum(work for _, work in pieces) / max(work, 1) for _, work in chosen]
    tensors: list[Tensor] = [p for one in segments for p in one.module.parameters()]
    leaves = {name for one in segments for name in one.inputs if name.startswith("leaf_")}
    known = [inputs.slice(chunk, leaves) for chunk, _ in chosen]
    tensors += [t for one in known for t in one.values() if isinstance(t, Tensor)]
    times, kept = [], []
    with (
        undisturbed(module),
        intercept(find_layers(module), context),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for segment in segments:

            def run(place: int, segment: Segment = segment) -> NDArray[np.float64]:
                return _run(layers, segment, chosen[place][0], known[place], tensors, context)

            places = range(len(chosen))
            for place in places:  # do not time what is computed once per chunk
                run(place)
            limit = _LONGEST_S / len(segments)
            best = [_best(partial(run, place), limit) * share[place] for place in places]
            times.append(np.median(best, axis=0))
            store = context.store if isinstance(context, MessageContext) else None
            kept.append(store.empty() if isinstance(store, _Zeros) else {})
    found = np.array(times)
    forms = [_form_of(segment, layers) for segment in segments]
    for form in set(forms):  # layers of one form take the same time
        same = [i for i, one in enumerate(forms) if one == form]
        found[same, :2] = np.median(found[same, :2], axis=0)
    rows = zip(found.tolist(), kept, strict=True)
    costs = [LayerCost(ahead, back, round(saved), **more) for (ahead, back, saved), more in rows]
    again = zip(layers.repeatable, costs[len(layers.segments) :], strict=True)
    return StepCosts(tuple(costs[: len(layers.segments)]), dict(again))


def _best(run: Callable[[], NDArray[np.float64]], limit_s: float) -> NDArray[np.float64]:
    """Return the minimum times of several runs: load from other processes only adds time."""
    runs, start = [run()], time.perf_counter()
    while len(runs) < _NUM_RUNS and time.perf_counter() - start < limit_s:
        runs.append(run())
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


def _run(
    layers: Layers,
    segment: Segment,
    chunk: Any,
    known: dict[str, Any],
    given: Sequence[Tensor],
    context: MessageContext | NativeContext,
) -> NDArray[np.float64]:
    """Run a layer over `chunk`, forward and backward; add its outputs, detached, to `known`.

    Returns `[3]`: seconds of forward and of backward, bytes saved in between, without `given`.
    """
    devices = {tensor.device for tensor in given}

    def now() -> float:
        for device in devices:
            synchronize(device)
        return time.perf_counter()

    values = {name: _cut_off(known[name], name, layers) for name in segment.inputs}
    sources = [t for t in values.values() if isinstance(t, Tensor) and t.requires_grad]
    with counting_saved_bytes(given) as saved:
        start = now()
        run_segments((segment,), values, chunk, context)
        forward_s = now() - start
    roots = [values[n] for n in segment.outputs if values[n].requires_grad]
    known |= {name: values[name].detach() for name in segment.outputs}
    wanted = [p for p in segment.module.parameters() if p.requires_grad] + sources
    backward_s = 0.0
    if roots and wanted:
        grads = [torch.ones_like(root) for root in roots]
        start = now()
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)
        backward_s = now() - start
    return np.array((forward_s, backward_s, sum(saved)))


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
