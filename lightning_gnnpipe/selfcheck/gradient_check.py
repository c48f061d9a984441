"""Compares gradients of the layers on chunks with plain autograd, on a small graph.

Autograd treats a stale row as a constant, so gradients on chunks are exact only without stale
reads. The check moves edges so that each leads from a chunk to itself or to a later chunk: run in
order, chunks read fresh rows only. Layers that read edges in both directions or shares of all
chunks (HANConv), or have a norm over all nodes (a chunk sees only rows of earlier chunks), are
compared on the whole graph only. In half precision, only each layer's own gradients are compared:
over many layers they are mostly rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks import run_segments
from lightning_gnnpipe.graph import Chunk
from lightning_gnnpipe.passing import CallKey
from lightning_gnnpipe.selfcheck.trial import (
    Trial,
    as_real,
    chunk_of_node,
    flatten,
    refuse_difference,
)
from lightning_gnnpipe.stages import Layers, Segment
from lightning_gnnpipe.staleness import StalenessRecorder

# Relative to the gradient's norm. Rounding may flip a rectifier in one row of many.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-2}
_ROUGH = 0.2  # half precision
_FLOOR = 0.1  # share of the largest gradient; smaller ones are mostly rounding


def check_gradients(
    module: nn.Module, layers: Layers, call: Call, kinds: Inputs, *, on_chunks: bool
) -> None:
    """Raise `UnsupportedError` if gradients of `layers` and `module` differ on a small graph."""
    edges = _ascending(kinds.edge_index, kinds.num_nodes)
    check = _GradientCheck(module, Trial(module, layers, call, kinds), is_reentrant=False)
    check.compare_whole(call)
    if on_chunks:
        moved = replace(kinds, edge_index=edges)
        trial = Trial(module, layers, _with_edges(call, moved), moved)
        check = _GradientCheck(module, trial, is_reentrant=check.is_reentrant)
        with trial.running():
            with torch.no_grad():
                _, found = trial.run_all(check.whole)
            values = {name: value.detach() for name, value in found.items()}
            for segment in layers.segments:
                check.compare_chunks(segment, values)


def _with_edges(call: Call, kinds: Inputs) -> Call:
    """Return `call` with the edges of `kinds` and copies of its other leaves."""
    sets = torch.split(kinds.edge_index, list(kinds.edge_sizes), dim=1)
    leaves = tuple(
        sets[number]
        if kind is Kind.EDGE_INDEX
        else leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for kind, number, leaf in zip(kinds.kinds, kinds.edge_sets, call.leaves, strict=True)
    )
    return replace(call, leaves=leaves)


def _ascending(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the edges, `[2, num_edges]`; move sources in later chunks into the target's chunk.

    Targets stay, so that edges stay in their groups. The new source differs from the target, unless
    the target is alone in its chunk.
    """
    assignment = chunk_of_node(num_nodes).to(edge_index.device)
    num_chunks = int(assignment.max()) + 1
    source, target = edge_index
    own = assignment[target]
    size = (num_nodes - own + num_chunks - 1) // num_chunks
    place = source // num_chunks % size
    place = torch.where(place == target // num_chunks, (place + 1) % size, place)
    is_late = assignment[source] > own
    return torch.stack([torch.where(is_late, place * num_chunks + own, source), target])


class _GradientCheck:
    """Compares gradients of a trial; `is_reentrant`: `.grad` works but `autograd.grad` does not."""

    def __init__(self, module: nn.Module, trial: Trial, *, is_reentrant: bool) -> None:
        self.module, self.trial, self.layers = module, trial, trial.layers
        (self.whole,) = trial.plan.whole.chunks
        self.is_reentrant = is_reentrant

    def compare_whole(self, call: Call) -> None:
        """Compare the layers on the whole graph with the module."""
        segments, chunk = self.layers.segments, self.whole
        parameters = trained(self.module)
        outputs = flatten(self.layers.run_plain(self.module, call))
        own = [leaf for leaf in call.leaves if leaf.requires_grad]
        expected = self._grads(outputs, [*parameters, *own], [some_gradient(t) for t in outputs])
        with self.trial.running():
            leaves, values = self.trial.run_all(chunk)
        rows = [
            values[name][self.trial.inputs.places(chunk, self.layers.values[name]).argsort()]
            for name in self.layers.outputs
        ]
        roots = flatten(self.layers.rebuild_output(rows, call.leaves))
        cotangents = [some_gradient(root) for root in roots]
        with self.trial.running():
            found = self._grads(roots, [*parameters, *own, *leaves.values()], cotangents)
        of_head = found[len(parameters) :][: len(own)]
        for leaf, grad in zip(leaves.values(), found[len(parameters) + len(own) :], strict=True):
            leaf.grad = grad
        self.trial.inputs.add_grads(chunk, {n: t for n, t in leaves.items() if t.requires_grad})
        slots = [slot for slot, leaf in enumerate(call.leaves) if leaf.requires_grad]
        whole = [
            add_grad(self.trial.inputs.take_grad(slot), grad)
            for slot, grad in zip(slots, of_head, strict=True)
        ]
        pairs = dict(zip(map(id, parameters), zip(found, expected, strict=False), strict=False))
        if not all(t.dtype.to_real() in _TOLERANCE for t in (*parameters, *own)):
            return
        heads = () if self.layers.head is None else (self.layers.head,)
        for segment in reversed((*segments, *heads)):  # a wrong gradient spreads to earlier layers
            self._compare(segment, [pairs[id(p)] for p in trained(segment.module)])
        self._compare(segments[0], list(zip(whole, expected[len(parameters) :], strict=True)))

    def compare_chunks(self, segment: Segment, values: dict[str, Tensor]) -> None:
        """Compare one layer on chunks and on the whole graph, both from `values` of the whole."""
        store = self.trial.store
        expected = self._run(segment, (self.whole,), values)
        if any(isinstance(k, CallKey) and k.segment == segment.index for k in store.moments.calls):
            return  # a norm over all nodes sees only rows of earlier chunks
        for chunks in (self.trial.plan.chunks, self.trial.plan.chunks[::-1]):
            store.begin_step(store.step + 1)
            store.recorder = StalenessRecorder()
            found = self._run(segment, chunks, values)
            if not any(one.stale_rows for one in store.recorder.by_key.values()):
                self._compare(segment, list(zip(found, expected, strict=True)))
                return

    def _run(
        self, segment: Segment, chunks: Sequence[Chunk], values: dict[str, Tensor]
    ) -> list[Tensor | None]:
        """Return gradients of the layer's weights, then of its inputs in plan order."""
        parameters = trained(segment.module)
        runs = []
        for chunk in chunks:
            parts = {name: self._part(name, chunk, values) for name in segment.inputs}
            sources = {name: part for name, part in parts.items() if part.requires_grad}
            # Clones, because layers cannot overwrite leaves of autograd.
            local = {n: t.clone() if n in sources else t for n, t in parts.items()}
            run_segments((segment,), local, chunk, self.trial.context)
            runs.append((chunk, [local[name] for name in segment.outputs], sources))
        totals: list[Tensor | None] = [None] * len(parameters)
        inputs: dict[str, Tensor] = {}
        for chunk, roots, sources in reversed(runs):
            cotangents = [
                self._rows(some_gradient(values[name]), name, chunk) for name in segment.outputs
            ]
            grads = self._grads(roots, [*parameters, *sources.values()], cotangents)
            totals = list(map(add_grad, totals, grads))
            for name, grad in zip(sources, grads[len(parameters) :], strict=True):
                total = inputs.setdefault(name, torch.zeros_like(values[name]))
                if grad is not None:
                    self._rows(total, name, chunk).add_(grad)
        self.trial.store.end_step()
        return [*totals, *inputs.values()]

    def _part(self, name: str, chunk: Chunk, values: dict[str, Tensor]) -> Tensor:
        if name.startswith("leaf_"):
            return self.trial.inputs.slice(chunk, [name])[name]
        part = self._rows(values[name], name, chunk).clone()
        return part.requires_grad_(self.layers.values[name].requires_grad)

    def _rows(self, tensor: Tensor, name: str, chunk: Chunk) -> Tensor:
        """Return the chunk's part of `tensor`, whose rows are like the value `name`."""
        kind, edge_set = self.trial.kind_of(name)
        if kind not in (Kind.NODE, Kind.EDGE):
            return tensor
        first, end = self.trial.inputs.span(chunk, kind, edge_set)
        return tensor[first:end]

    def _compare(
        self, segment: Segment, pairs: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> None:
        difference = find_difference(pairs, _TOLERANCE)
        if difference is not None:
            raise refuse_difference("gradients", self.trial.names.of(segment), difference)

    def _grads(
        self, roots: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        if not self.is_reentrant:
            try:
                return gradients(roots, wanted, cotangents)
            except RuntimeError as error:
                if "use_reentrant" not in str(error):
                    raise
            self.is_reentrant = True
        return gradients(roots, wanted, cotangents, is_reentrant=True)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `module` that need a gradient."""
    return [p for p in module.parameters() if p.requires_grad]


def add_grad(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients; None is zero."""
    return grad if total is None else total if grad is None else total + grad


def find_difference(
    pairs: Iterable[tuple[Tensor | None, Tensor | None]], tolerances: Mapping[torch.dtype, float]
) -> float | None:
    """Return the norm of the first difference that is more than rounding, or None.

    The second of a pair is the exact gradient. `tolerances`: by dtype, relative to its norm.
    """
    both = [(as_real(_filled(a, b)).double(), as_real(_filled(b, a))) for a, b in pairs]
    finite = [(a[b.isfinite()], b[b.isfinite()]) for a, b in both]  # skip NaN of the model
    largest = max((float(b.double().norm()) for _, b in finite), default=0.0)
    for ours, theirs in finite:
        tolerance = tolerances.get(theirs.dtype, _ROUGH)
        difference = float((ours - theirs.double()).norm())
        floor = tolerance * _FLOOR * largest
        if not difference <= tolerance * float(theirs.double().norm()) + floor:
            return difference
    return None


def some_gradient(tensor: Tensor) -> Tensor:
    """Return a gradient for `tensor` that is the same in each run."""
    numbers = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
    return numbers.cos().to(tensor.dtype).view(tensor.shape)


def gradients(
    roots: Sequence[Tensor],
    wanted: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    is_reentrant: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of `wanted`; None if not required or not reached.

    `is_reentrant`: take them through `.grad`, as reentrant activation checkpoints require.
    """
    reached = [(r, c) for r, c in zip(roots, cotangents, strict=True) if r.requires_grad]
    needed = [tensor for tensor in wanted if tensor.requires_grad]
    if not reached or not needed:
        return [None] * len(wanted)
    ends, given = zip(*reached, strict=True)
    if is_reentrant:
        before = [tensor.grad for tensor in needed]
        for tensor in needed:
            tensor.grad = None
        torch.autograd.backward(ends, given)
        found = tuple(tensor.grad for tensor in needed)
        for tensor, grad in zip(needed, before, strict=True):
            tensor.grad = grad
    else:
        found = torch.autograd.grad(ends, needed, given, retain_graph=True, allow_unused=True)
    by_tensor = dict(zip(map(id, needed), found, strict=True))
    return [by_tensor.get(id(tensor)) for tensor in wanted]


def _filled(grad: Tensor | None, other: Tensor | None) -> Tensor:
    if grad is not None:
        return grad
    return torch.zeros(()) if other is None else torch.zeros_like(other)
