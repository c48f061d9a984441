"""What each layer costs: timed, forward and backward, on a few chunks.

All layers run on a chunk one after the other, then back, as in a training step, so that caches are
as warm or cold as they will be.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from lightning_gnnpipe.engine.chunk_run import run_segments
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.step_costs import LayerCost, StepCosts
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.history import HistoryOptions, Moments
from lightning_gnnpipe.passing import CallKey, MessageContext, find_layers, intercept
from lightning_gnnpipe.stages import Layers, Segment, part_of, undisturbed
from lightning_gnnpipe.types import ChunkView

_MAX_TIMED = 3


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
    """Return the costs of all layers, from the second runs over a few middle-sized chunks."""
    parts = [part_of(layers.segments[i], (name,)) for name, i in layers.repeatable.items()]
    segments = (*layers.segments, *parts)
    ranked = sorted(plan.chunks, key=work_of)
    num_timed = min(_MAX_TIMED, max(1, plan.num_chunks // 4))
    first = (len(ranked) - num_timed) // 2
    timed = ranked[first : first + num_timed]
    total = sum(work_of(chunk) for chunk in plan.chunks)
    context = MessageContext(_ZeroHalo(plan, histories), plan)
    context.leaves = inputs
    with (
        undisturbed(module),
        intercept(find_layers(module), context),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for chunk in timed:  # what is computed once for a chunk is no cost of a layer
            _run(layers, segments, chunk, inputs, context)
        runs = [_run(layers, segments, chunk, inputs, context) for chunk in timed]
    scales = [total / max(work_of(chunk), 1) for chunk in timed]

    def over_chunks(values: list[float]) -> float:
        return median(value * scale for value, scale in zip(values, scales, strict=True))

    def cost(place: int, history_bytes: int = 0, pushed_row_bytes: int = 0) -> LayerCost:
        return LayerCost(
            over_chunks([run[place].forward_s for run in runs]),
            over_chunks([run[place].backward_s for run in runs]),
            round(over_chunks([run[place].saved_bytes for run in runs])),
            history_bytes,
            pushed_row_bytes,
        )

    is_cut = plan.num_chunks > 1
    return StepCosts(
        tuple(
            cost(i, is_cut * _history_bytes(context, s), _pushed_row_bytes(context, s))
            for i, s in enumerate(layers.segments)
        ),
        {name: cost(len(layers.segments) + i) for i, name in enumerate(layers.repeatable)},
    )


@dataclass(slots=True)
class _Timed:
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: float = 0.0


def _run(
    layers: Layers,
    segments: Sequence[Segment],
    chunk: Chunk,
    inputs: PlannedInputs,
    context: MessageContext,
) -> list[_Timed]:
    """Run all segments over `chunk`, forward and backward, each cut off from its neighbours."""
    leaves = {name for s in segments for name in s.inputs if name.startswith("leaf_")}
    known = inputs.slice(chunk, leaves)
    timed, graphs = [_Timed() for _ in segments], []
    parameters = (p for segment in segments for p in segment.module.parameters())
    given = {t.untyped_storage().data_ptr() for t in (*known.values(), *parameters)}
    for segment, one in zip(segments, timed, strict=True):
        values = {name: _cut_off(known[name], name, layers) for name in segment.inputs}
        sources = [t for t in values.values() if t.requires_grad]
        with _counted(one, given), _clocked(context, one, "forward_s"):
            run_segments((segment,), values, chunk, context)
        roots = [values[n] for n in segment.outputs if values[n].requires_grad]
        known |= {name: values[name].detach() for name in segment.outputs}
        graphs.append((roots, sources))
    for segment, one, (roots, sources) in reversed(list(zip(segments, timed, graphs, strict=True))):
        wanted = [*(p for p in segment.module.parameters() if p.requires_grad), *sources]
        if not roots or not wanted:
            continue
        grads = [torch.ones_like(root) for root in roots]
        with _clocked(context, one, "backward_s"):
            torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    return timed


@contextmanager
def _clocked(context: MessageContext, one: _Timed, attribute: str) -> Iterator[None]:
    is_cuda = torch.cuda.is_available() and context.perm.is_cuda
    if is_cuda:
        torch.cuda.synchronize(context.perm.device)
    start = time.perf_counter()
    yield
    if is_cuda:
        torch.cuda.synchronize(context.perm.device)
    setattr(one, attribute, time.perf_counter() - start)


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


def _cut_off(tensor: Tensor, name: str, layers: Layers) -> Tensor:
    known = layers.values.get(name)
    is_crossing = not name.startswith("leaf_") and known is not None and known.requires_grad
    return tensor.detach().requires_grad_() if is_crossing else tensor


def _history_bytes(context: MessageContext, segment: Segment) -> int:
    """Return the bytes of a layer's histories and gradient buffers, where the layers compute."""
    store = context.store
    assert isinstance(store, _ZeroHalo)
    if not store.is_local:
        return 0
    kept = (*store.tables.items(), *store.grads.items())
    return sum(table.nbytes for key, table in kept if key.segment == segment.index)


def _pushed_row_bytes(context: MessageContext, segment: Segment) -> int:
    store = context.store
    assert isinstance(store, _ZeroHalo)
    return sum(n for key, n in store.pushed_row_bytes.items() if key.segment == segment.index)


class _OwnMoments:
    """Serves norms the statistics of the very rows they ask for."""

    def put(self, key: CallKey, rows: Tensor) -> Moments:
        return Moments.of(rows)

    def exchange(self, key: CallKey, chunk: int, rows: Tensor) -> tuple[Moments, None]:
        return Moments.of(rows), None


class _ZeroHalo:
    """A store that serves zeros and keeps nothing: the costs are the same.

    But for transfers, if histories are on another device: those are left out.
    """

    scale = 1.0
    shards = None

    def __init__(self, plan: ChunkPlan, options: HistoryOptions) -> None:
        self.moments = _OwnMoments()
        self._num_nodes, self._num_chunks = plan.num_nodes, plan.num_chunks
        self._options = options
        self._zeros: dict[object, Tensor] = {}
        self.tables: dict[CallKey, Tensor] = {}
        self.grads: dict[CallKey, Tensor] = {}
        self.pushed_row_bytes: dict[CallKey, int] = {}

    @property
    def is_local(self) -> bool:
        return self._options.device is None

    @property
    def by_chunk(self) -> _ZeroHalo:
        other = copy.copy(self)
        other._num_nodes, other.pushed_row_bytes = self._num_chunks, {}  # not a node's
        return other

    def push(
        self, key: CallKey, chunk: ChunkView, rows: Tensor, *, keeps_old: bool = False
    ) -> None:
        dtype = (self._options.dtype if rows.is_floating_point() else None) or rows.dtype
        self.tables[key] = self._table(rows, dtype)
        self.pushed_row_bytes[key] = rows[:1].nbytes

    def _table(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return one table of zeros for all layers, each page of it written."""
        shape = (self._num_nodes, *rows.shape[1:])
        if (shape, dtype) not in self._zeros:
            self._zeros[shape, dtype] = rows.new_zeros(shape, dtype=dtype).zero_()
        return self._zeros[shape, dtype]

    def read(self, key: CallKey, chunk: ChunkView) -> Tensor:
        return self.tables[key]

    def pull(self, key: CallKey, chunk: ChunkView, out: Tensor) -> tuple[int, ...]:
        out.zero_()
        return ()

    def pull_again(
        self, key: CallKey, chunk: ChunkView, out: Tensor, stale: Collection[int]
    ) -> None: ...

    def push_grad(self, key: CallKey, chunk: ChunkView, grad: Tensor) -> None:
        self.grads[key] = self._table(grad, grad.dtype)

    def pull_grad(self, key: CallKey, chunk: ChunkView) -> Tensor | None: ...
    def keep_output(self, key: CallKey, chunk: ChunkView, rows: Tensor) -> None: ...
    def kept_output(self, key: CallKey, chunk: ChunkView) -> Tensor:
        return self.tables[key][chunk.start : chunk.end]

    def add_output_grad(
        self, key: CallKey, chunk: ChunkView, grad: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        self.grads[key] = self._table(grad, self._options.linear_dtype(grad))
        return self.grads[key], None
