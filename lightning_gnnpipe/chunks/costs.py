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

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks.inputs import BatchInputs, PlannedInputs
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


_MAX_TIMED = 3  # chunks
_NUM_RUNS = 5
_LONGEST_S = 0.3  # time for repeated runs of all layers on a chunk


def measure_layers(
    module: nn.Module,
    layers: Layers,
    plan: ChunkPlan | BatchPlan,
    call: Call,
    inputs: Inputs,
    histories: HistoryOptions,
) -> StepCosts:
    """Time layers, and values that stages may compute again, on a few middle-sized chunks.

    Layers that differ only in the values of their weights take the same time, the median. A batch
    of graphs has no histories.
    """
    store: _Zeros | None = None
    context: MessageContext | NativeContext
    batch: BatchInputs | PlannedInputs
    if isinstance(plan, BatchPlan):
        batch, context = BatchInputs(call, inputs, plan), NativeContext(1)  # plain BatchNorm
    else:
        batch, store = PlannedInputs(plan), _Zeros(plan, histories)
        batch.load(call, inputs)
        context = MessageContext(store, plan)
        context.leaves = batch
    parts = [part_of(layers.segments[i], (name,)) for name, i in layers.repeatable.items()]
    segments = (*layers.segments, *parts)
    chunks: Sequence[Any] = plan.chunks
    ranked = sorted(chunks, key=lambda one: one.work)
    num_timed = min(_MAX_TIMED, max(1, len(ranked) // 4))
    chosen = ranked[(len(ranked) - num_timed) // 2 :][:num_timed]
    share = [sum(one.work for one in ranked) / max(one.work, 1) for one in chosen]
    leaves = {name for one in segments for name in one.inputs if name.startswith("leaf_")}
    known = [batch.slice(chunk, leaves) for chunk in chosen]
    given: list[Tensor] = [p for one in segments for p in one.module.parameters()]
    given += [t for one in known for t in one.values() if isinstance(t, Tensor)]
    found, held = np.zeros((len(segments), 3)), []
    with (
        undisturbed(module),
        intercept(find_layers(module), context),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for number, segment in enumerate(segments):
            runs = [
                partial(_run, layers, segment, chunk, values, given, context)
                for chunk, values in zip(chosen, known, strict=True)
            ]
            for run in runs:  # do not time what is computed once per chunk
                run()
            best = [_best(run, _LONGEST_S / len(segments)) for run in runs]
            scaled = [one * factor for one, factor in zip(best, share, strict=True)]
            found[number] = np.median(scaled, axis=0)
            held.append({} if store is None else store.empty())
    forms = [_form_of(segment) for segment in segments]
    for form in set(forms):
        same = [i for i, one in enumerate(forms) if one == form]
        found[same, :2] = np.median(found[same, :2], axis=0)
    rows = zip(found.tolist(), held, strict=True)
    costs = [LayerCost(ahead, back, round(saved), **more) for (ahead, back, saved), more in rows]
    num_layers = len(layers.segments)
    again = dict(zip(layers.repeatable, costs[num_layers:], strict=True))
    return StepCosts(tuple(costs[:num_layers]), again)


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


def _best(run: Callable[[], NDArray[np.float64]], limit_s: float) -> NDArray[np.float64]:
    """Return the minimum times of several runs: load from other processes only adds time."""
    runs, start = [run()], time.perf_counter()
    while len(runs) < _NUM_RUNS and time.perf_counter() - start < limit_s:
        runs.append(run())
    return np.min(runs, axis=0)


def _form_of(segment: Segment) -> Hashable:
    """Return a key that is equal for segments that differ only in the values of their weights."""

    def form(node: fx.Node) -> Hashable:
        if node.op == "call_module":
            module = segment.module.get_submodule(str(node.target))
            return repr(module), tuple(tuple(p.shape) for p in module.parameters())
        return node.target if node.op.startswith("call_") else node.op

    return tuple(map(form, segment.module.graph.nodes))


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
    crossing = [n for n in segment.inputs if n in layers.values and not n.startswith("leaf_")]
    values = {name: known[name] for name in segment.inputs}
    for name in crossing:
        values[name] = known[name].detach().requires_grad_(layers.values[name].requires_grad)
    wanted: list[Tensor] = [p for p in segment.module.parameters() if p.requires_grad]
    wanted += [t for t in values.values() if isinstance(t, Tensor) and t.requires_grad]
    with counting_saved_bytes(given) as saved:
        start = now()
        run_segments((segment,), values, chunk, context)
        forward_s = now() - start
    roots = [values[name] for name in segment.outputs if values[name].requires_grad]
    known |= {name: values[name].detach() for name in segment.outputs}
    backward_s = 0.0
    if roots and wanted:
        grads = [torch.ones_like(root) for root in roots]
        start = now()
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)
        backward_s = now() - start
    return np.array((forward_s, backward_s, sum(saved)))


def now() -> float:
    """Return the time in seconds, once the GPU, if there is one, has computed all before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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
