"""A chunk's forward and backward as CUDA graphs: one launch each, not one for each operation.

    exact step        eager; writes the histories
    1st pipelined     eager; allocates what later steps use in place
    2nd pipelined     each chunk's forward is captured and replayed, then, in the order of the
                      schedule, its backward
    later             received rows, leaves and gradients of outputs are copied to where the graphs
                      read them; replay; gradients are read where the graphs wrote them

A chunk runs the same operations on the same memory in each step; what depends on the order of
chunks stands in small tensors, written before the first replay (`StepOrder.set`, and
`MessageContext.prepare`). A replay runs no Python, so `HistoryStore.note` repeats the package's
bookkeeping of the chunk.

Memory: graphs of one pool may overwrite each other's results unless they are replayed in the order
of capture. The order of chunks is new in each step, so each chunk has a pool of its own, for its
forward and its backward.

Random numbers: each segment draws from a generator of its own, which is seeded before each replay
as eager code seeds the device's generator. So numbers equal eager ones.

Weights: a graph adds its gradients to totals that all chunks share. They reach `.grad` at the end
of the phase, outside of graphs.

If weights, histories or autocast have changed since the last pipelined step, a step runs eagerly
and the next one captures. If a capture fails, all later steps run eagerly; a warning says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import leaves_behind
from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.errors import Fallbacks, first_line
from lightning_gnnpipe.passing import MessageContext

if TYPE_CHECKING:
    from lightning_gnnpipe.chunks.step import PassSpec

SeedOf = Callable[[int, int], int]
# Returns the seed of a segment and chunk; None in a capture, where the graph has a generator.
Seeding = Callable[[int, int], int | None]


@dataclass(slots=True)
class ChunkState:
    """A chunk's inputs and outputs on a stage, and the function that runs its backward."""

    received: list[Tensor]
    leaves: dict[str, Any]
    sent: list[Tensor]
    backward: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch.autograd.backward


Run = Callable[[Any, Sequence[Tensor], dict[str, Any], Seeding], ChunkState]


_MANY = 5


class _Chunk:
    """The graphs of one chunk, and the tensors that they read and write."""

    def __init__(
        self, spec: PassSpec, chunk: Any, received: Sequence[Tensor], leaves: dict[str, Any]
    ) -> None:
        again = spec.inputs.slice(chunk, leaves)
        self._copied = [name for name, leaf in leaves.items() if again[name] is not leaf]
        for name in self._copied:  # new in each step
            if spec.stage.values[name].kind not in (Kind.NODE, Kind.WHOLE):
                raise RuntimeError("values of edges are new in each step")
        self.received = [_copy(one) for one in received]
        self.leaves = leaves | {name: _copy(leaves[name]) for name in self._copied}
        self.pool = torch.cuda.graph_pool_handle()
        self.forward: Any = None
        self.backward: Any = None
        self.state = ChunkState([], {}, [])
        self.ran: Any = None  # see `HistoryStore.ran`
        self.grads: list[Tensor] = []  # of outputs
        self.of_inputs: list[tuple[Tensor, Tensor]] = []  # inputs, and their gradients
        self.weights: list[Tensor] = []  # those with gradients

    def reads(self, leaves: dict[str, Any]) -> bool:
        """Whether the graphs read these leaves, or copies of them."""
        kept = (name for name in leaves if name not in self._copied)
        return all(leaves[name] is self.leaves[name] for name in kept)

    def load(self, received: Sequence[Tensor], leaves: dict[str, Any]) -> None:
        """Copy the inputs of this step to where the graphs read them."""
        pairs = [*zip(self.received, received, strict=True)]
        pairs += [(self.leaves[name], leaves[name]) for name in self._copied]
        for own, new in pairs:
            own.data.copy_(new.detach())  # not a write that autograd detects


def can_capture(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda"


class CapturedChunks:
    """The chunks of one input on one stage as CUDA graphs."""

    def __init__(self, device: torch.device, fallbacks: Fallbacks) -> None:
        self._device, self._fallbacks = device, fallbacks
        self._chunks: dict[int, _Chunk] = {}
        self._totals: dict[int, tuple[Tensor, Tensor]] = {}  # weight and gradient, by id
        self._used: dict[int, tuple[Tensor, Tensor]] = {}  # of this step
        self._generators: dict[int, torch.Generator] = {}  # by segment
        self._side: Any = None  # the stream of captures
        self._last: Any = None  # see `_memory`; at the end of the last pipelined step
        self._held: Any = None  # objects of `_last`, so that their ids stay theirs
        self._has_failed, self._num_eager = False, 0  # the latter: steps since the last on graphs

    def begin(self, spec: PassSpec, tensors: Sequence[Tensor], *, is_usual: bool) -> bool:
        """Begin a step on the module's `tensors`; return whether chunks run as graphs.

        `is_usual`: no callback records staleness, and no other pass awaits its backward.
        """
        kind = self._device.type
        self._kind = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._spec, self._used = spec, {}
        assert isinstance(spec.context, MessageContext) and spec.context.store is not None
        self._context, self._store = spec.context, spec.context.store
        memory = self._memory(tensors)
        if self._has_failed or memory is None or memory != self._last or not is_usual:
            self._num_eager += is_usual and not self._has_failed
            if self._num_eager == _MANY:
                self._fallbacks.tell(
                    "The last %s steps ran without CUDA graphs: in each, weights, buffers or "
                    "histories moved in memory, or a norm had a new number of rows.",
                    _MANY,
                )
            return False
        self._num_eager = 0
        self._context.prepare()
        for _, total in self._totals.values():
            total.zero_()
        return True

    def end(self, tensors: Sequence[Tensor]) -> None:
        """End the backward phase: hand over the gradients of weights."""
        if self._used:
            weights, totals = zip(*self._used.values(), strict=True)
            torch.autograd.backward(weights, totals)
        memory = self._memory(tensors)
        if memory != self._last:
            self._chunks, self._totals = {}, {}
            self._last, self._held = memory, self._objects()

    def forward(
        self, chunk: Any, received: Sequence[Tensor], leaves: dict[str, Any], run: Run
    ) -> ChunkState:
        """Run a chunk: replay its graph, captured now if there is none; else eagerly."""
        seed_of = self._spec.seed_of
        assert seed_of is not None
        for segment in self._spec.stage.computed:
            if segment.index not in self._generators:
                self._generators[segment.index] = torch.Generator(self._device)
            self._generators[segment.index].manual_seed(seed_of(segment.index, chunk.index))
        one = self._chunks.get(chunk.index)
        if one is not None and one.reads(leaves):
            self._store.note(one.ran, chunk)
        else:
            one = None if self._has_failed else self._capture(chunk, received, leaves, run)
        if one is None:
            return run(chunk, received, leaves, seed_of)
        one.load(received, leaves)
        one.forward.replay()
        return replace(one.state, backward=partial(self._backward, one))

    def _capture(
        self, chunk: Any, received: Sequence[Tensor], leaves: dict[str, Any], run: Run
    ) -> _Chunk | None:
        """Capture the forward of a chunk; None if that fails."""
        default, own = torch.cuda.default_generators[self._device.index or 0], self._generators

        def draw_from(segment: int, chunk: int) -> None:
            default.graphsafe_set_state(own[segment])

        one: _Chunk | None = None
        try:
            one = _Chunk(self._spec, chunk, received, leaves)
            with self._capturing(one.pool, own.values()) as one.forward:
                one.state = run(chunk, one.received, one.leaves, draw_from)
        except RuntimeError as error:  # as CUDA's are
            what = "the input of a chunk"
            if one is not None:
                number = self._context.segment
                layer = next(s for s in self._spec.stage.computed if s.index == number)
                nodes = layer.module.graph.find_nodes(op="call_module")
                what = f"layer {number} ({', '.join(str(n.target) for n in nodes)})"
            self._give_up(what, error)
            self._store.forget(chunk)
            return None
        one.ran = self._store.ran(chunk)
        self._chunks[chunk.index] = one
        return one

    def _backward(self, one: _Chunk, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Run a chunk backward, after its forward was replayed."""
        one.grads = one.grads or [torch.empty_like(root).detach() for root in roots]
        for own, new in zip(one.grads, grads, strict=True):
            own.copy_(new)
        if one.backward is None and not self._has_failed:
            try:
                one.backward = self._capture_backward(one, roots)
            except RuntimeError as error:
                self._give_up("the backward of a chunk", error)
        if one.backward is None:
            torch.autograd.backward(roots, one.grads, retain_graph=True)
            return
        one.backward.replay()
        for tensor, grad in one.of_inputs:
            tensor.grad = grad
        self._used |= {id(weight): self._totals[id(weight)] for weight in one.weights}

    def _capture_backward(self, one: _Chunk, roots: Sequence[Tensor]) -> Any:
        wanted, own = leaves_behind(roots), {*map(id, (*one.received, *one.leaves.values()))}
        for tensor in wanted:
            if id(tensor) not in own and id(tensor) not in self._totals:
                self._totals[id(tensor)] = tensor, torch.zeros_like(tensor).detach()
        # What forward has saved stays: if this fails, backward runs eagerly.
        with self._capturing(one.pool) as graph:
            given = roots, wanted, one.grads
            grads = torch.autograd.grad(*given, retain_graph=True, allow_unused=True)
            found = [(t, g) for t, g in zip(wanted, grads, strict=True) if g is not None]
            one.of_inputs = [(t, grad.contiguous()) for t, grad in found if id(t) in own]
            of_weights = [(t, grad) for t, grad in found if id(t) not in own]
            if any(grad.is_sparse for _, grad in of_weights):
                raise RuntimeError("a gradient is sparse")
            for weight, grad in of_weights:
                self._totals[id(weight)][1].add_(grad)
        one.weights = [weight for weight, _ in of_weights]
        sent = [t.detach().requires_grad_(t.requires_grad) for t in one.state.sent]
        one.state = replace(one.state, sent=sent)  # the pool keeps what autograd has saved
        return graph

    @contextmanager
    def _capturing(self, pool: Any, generators: Iterable[torch.Generator] = ()) -> Iterator[Any]:
        """Capture the block; yields the graph.

        Within, the device's generator has a temporary state: a failed capture makes it unusable.
        """
        default = torch.cuda.default_generators[self._device.index or 0]
        before, graph = default.graphsafe_get_state(), torch.cuda.CUDAGraph()
        for one in generators:
            graph.register_generator_state(one)
        self._side = self._side or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        is_cached = torch.is_autocast_cache_enabled()
        default.graphsafe_set_state(torch.Generator(self._device))
        torch.set_autocast_cache_enabled(False)  # a cast weight would lie in one graph's memory
        options: Any = {"pool": pool, "stream": self._side, "capture_error_mode": "thread_local"}
        try:
            # A capture that fails leaves its stream the current one.
            with torch.cuda.stream(self._side), torch.cuda.graph(graph, **options):
                yield graph
        finally:
            torch.set_autocast_cache_enabled(is_cached)
            default.graphsafe_set_state(before)

    def _give_up(self, what: str, error: RuntimeError) -> None:
        self._has_failed, cause = True, error.__context__  # of the error that ends the capture
        self._fallbacks.tell(
            "Chunks run without CUDA graphs, since %s cannot be captured: %s. Layers must not wait "
            "for the device, as .item(), boolean masks and torch.unique do.",
            what,
            first_line(cause if isinstance(cause, Exception) else error),
        )

    def _objects(self) -> tuple[Any, ...]:
        return self._spec.stage, self._spec.plan, self._context

    def _memory(self, tensors: Sequence[Tensor]) -> Any:
        """Return the objects and addresses that graphs depend on; None if shapes may change.

        Equal values at the end of a step and at the beginning of the next one mean that nothing has
        moved.
        """
        held, objects = self._store.memory(), list(map(id, self._objects()))
        weights = [(one.data_ptr(), one.shape, one.dtype, one.requires_grad) for one in tensors]
        return None if held is None else (self._kind, objects, weights, held)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
