"""Checks the traced layers against the plain module on a small sample, before training.

Each layer runs alone, on values of the plain module, so that roundings do not add up:

    values of layer l - 1 of the plain module    ->  layer l, plain        the same values
                     the same, in chunks         ->  layer l, on chunks    and gradients

No embedding is stale, see `LiveContext`. Of a batch of graphs the chunks are micro-batches. Random
numbers are constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks import (
    BatchInputs,
    PassInputs,
    PlannedInputs,
    kept_buffers,
    run_segments,
    unread_after,
)
from lightning_gnnpipe.errors import UnsupportedError, first_line
from lightning_gnnpipe.graph import plan_from_assignment, plan_micro_batches
from lightning_gnnpipe.layers import (
    NativeContext,
    find_convs,
    find_layers,
    intercept,
    without_memory,
)
from lightning_gnnpipe.methods import flatten
from lightning_gnnpipe.passing import MessageContext, replace_attributes
from lightning_gnnpipe.report import LayerNames
from lightning_gnnpipe.selfcheck.trial import LiveContext, deterministic
from lightning_gnnpipe.stages import (
    NUM_GRAPHS,
    Layers,
    Segment,
    draw_sample,
    needs_grad,
    restore_buffers,
    strip_root,
    undisturbed,
    whole_sample,
)
from lightning_gnnpipe.user_code import at, line_and_function

NUM_CHUNKS = 3
_MOST_ROWS = 2**20

# Relative to the norm of a tensor, and to the largest one of the layer: smaller ones are mostly
# rounding, which may flip a rectifier in some rows of a gradient.
_HALF = torch.bfloat16, torch.float16
_OF_VALUES = {torch.float64: (1e-8, 1e-9), torch.float32: (1e-3, 1e-4)}
_OF_VALUES |= dict.fromkeys(_HALF, (0.2, 0.02))
_OF_GRADIENTS = {torch.float64: (1e-8, 1e-9), torch.float32: (5e-2, 1e-3)}
_OF_GRADIENTS |= dict.fromkeys(_HALF, (0.3, 0.05))


def check_layers(
    module: nn.Module,
    layers: Layers,
    call: Call,
    inputs: Inputs,
    *,
    on_chunks: bool,
    with_gradients: bool = True,
) -> None:
    """Raise `UnsupportedError` if `layers`, traced in the present mode, differ from `module`.

    `on_chunks`: compare chunks as well. `with_gradients`: compare gradients as well. A module that
    fails on a part of the graph is compared on the whole, in the order of one chunk's edges.
    """
    with_gradients &= not layers.is_of_whole
    with _small_run(module, inputs.edge_index.device.type, with_gradients):
        is_whole = layers.is_of_whole
        sample = whole_sample(call, inputs) if is_whole else draw_sample(module, call, inputs)
        small = _in_full(replace(call, leaves=sample.leaves, num_nodes=None), module)
        num_nodes, edge_index = sample.num_nodes, sample.edge_index
        edge_sizes = sample.edge_sizes
        kinds = replace(inputs, num_nodes=num_nodes, edge_index=edge_index, edge_sizes=edge_sizes)
        assignment = torch.zeros(num_nodes, dtype=torch.int64)
        if on_chunks:
            assignment = _assign(edge_index.cpu(), num_nodes)
        plan = plan_from_assignment(edge_index.cpu(), num_nodes, assignment)
        plan = plan.with_edge_sets(edge_sizes).to(edge_index.device)
        check = _Check(module, layers, small, words=_OF_CHUNKS if on_chunks else _OF_WHOLE)
        if call.held:  # forward reads them itself, so it does not run on a part of the graph
            is_large = inputs.num_nodes + sum(inputs.edge_sizes) > _MOST_ROWS
            with torch.no_grad():
                if on_chunks or not is_large:  # of one chunk, PyG's own run may not fit
                    check.trace(_in_full(call, module), may_write=not on_chunks)
        else:
            check.trace(small, may_write=not on_chunks)
        context = LiveContext(plan) if on_chunks else MessageContext(None, plan)
        for chunks in (plan.whole.chunks, plan.chunks) if on_chunks else (plan.whole.chunks,):
            planned = PlannedInputs(plan)
            planned.load(small, kinds)
            check.pieces(chunks, planned, context)


def _assign(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return chunks: the nodes in turn, but moved until an eighth of the edges are within chunks.

    Else an own layer that takes a mean of its chunk might pass on rows of other chunks alone.
    """
    found = torch.arange(num_nodes) % min(NUM_CHUNKS, num_nodes)
    for source, target in edge_index.t().tolist():
        is_inner = found[edge_index[0]] == found[edge_index[1]]
        if 8 * int(is_inner.sum()) >= is_inner.numel():
            break
        found[source] = found[target]
    return torch.unique(found, return_inverse=True)[1]


def check_graphs(
    module: nn.Module,
    layers: Layers,
    call: Call,
    inputs: Inputs,
    *,
    in_parts: bool,
    with_gradients: bool = True,
) -> None:
    """Raise `UnsupportedError` if `layers`, traced in the present mode, differ from `module`.

    `in_parts`: compare two micro-batches as well; then BatchNorm uses its running statistics.
    `with_gradients`: compare gradients as well.
    """
    assert inputs.graphs is not None
    device = inputs.graphs.graph_of_node.device.type
    with ExitStack() as stack:
        stack.enter_context(_small_run(module, device, with_gradients))
        for norm in find_layers(module).batch_norms.values() if in_parts else ():
            stack.enter_context(replace_attributes(norm, {"training": False}))
        sample = draw_sample(module, call, inputs)
        assert sample.graphs is not None
        small = _in_full(replace(call, leaves=sample.leaves, slices={}), module)
        kinds = replace(inputs, num_nodes=sample.num_nodes, graphs=sample.graphs)
        check = _Check(module, layers, small, sample.graphs.num_graphs, words=_OF_BATCHES)
        check.trace(small, may_write=not in_parts)
        for num_chunks in (1, 2) if in_parts else (1,):
            plan = plan_micro_batches(sample.graphs.work(), sample.graphs.sizes, num_chunks)
            context = NativeContext(plan.num_chunks)
            check.pieces(plan.chunks, BatchInputs(small, kinds, plan), context)


def norms_without_batch(layers: Layers) -> set[str]:
    """Return names of modules called with at most one tensor, so without a batch vector."""
    found = set()
    for segment in layers.segments:
        for node in segment.module.graph.nodes:
            given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
            if node.op == "call_module" and len(given) < 2:
                found.add(strip_root(str(node.target)))
    return found


class _Words(NamedTuple):
    part: str
    both: str
    remedy: str


_OF_CHUNKS = _Words(
    "a chunk of the graph",
    "on chunks as on the whole of a small graph",
    "A chunk sees other nodes only in messages. In a layer of your own write x_j, d_i and d_j in "
    "message(self, x_j, d_i, d_j) for x[row], d[col] and d[row], or gcn_norm(edge_index, None, "
    "x.size(0)). Pass degrees to forward, pool behind the last layer, or train with num_chunks=1.",
)
_OF_WHOLE = _Words(
    "the graph with its edges in another order",
    "with the edges sorted by target as in your order",
    "Pass each tensor with a row per edge as an argument of forward, named after its edges: "
    "'rev_edge_weight' belongs to 'rev_edge_index'. Pass it twice, each in its own order, to use "
    "it with two edge sets. Or sort edge_index by target.",
)
_OF_BATCHES = _Words(
    "a few graphs of the batch",
    "on micro-batches as on the whole batch",
    "The model must treat each graph by itself. Normalise and pool with the batch vector, compare "
    "graphs in training_step, or train with num_chunks=1.",
)


class _Plain(NamedTuple):
    """A layer of the plain module on the sample."""

    segment: Segment
    given: dict[str, Any]
    sources: list[Tensor]  # weights, and the tensors of `given` that need gradients
    outputs: list[Tensor]
    gradients: list[Tensor | None]  # of `sources`


class _Check:
    """Compares the layers of a module with the module; `num_graphs`: None for one graph."""

    def __init__(
        self,
        module: nn.Module,
        layers: Layers,
        call: Call,
        num_graphs: int | None = None,
        *,
        words: _Words,
    ) -> None:
        self._module, self._layers, self._call = module, layers, call
        self._num_graphs, self._found = num_graphs, find_layers(module)
        self._leaves = set(self._named(call))
        self._words = words

    def trace(self, call: Call, *, may_write: bool = False) -> None:
        """Compare all layers, without chunks, with the module's own method on `call`.

        `may_write`: forward may change buffers.
        """
        module, layers = self._module, self._layers
        wanted = [*_trained(module), *filter(needs_grad, call.leaves)]
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        values, context = self._named(call), NativeContext(1)
        with intercept(self._found, context):
            result = call.run(module, call.leaves, self._num_graphs)
            exact = flatten(result)
            exact_grads = _gradients(exact, wanted)
            _check_buffers(module, buffers, may_write=may_write)
            unread = unread_after(layers.segments, layers.outputs)
            run_segments(layers.segments, values, None, context, unread=unread)
        output = layers.rebuild_output([values[name] for name in layers.outputs], call.leaves)
        _check_structure(output, result)
        ours = flatten(output)
        size = _difference(zip(ours, exact, strict=True), _OF_VALUES)
        if size is None:
            grads = zip(_gradients(ours, wanted), exact_grads, strict=True)
            size = _difference(grads, _OF_GRADIENTS)
        if size is not None:
            raise UnsupportedError(
                expected="the traced or listed layers to compute the same as forward",
                found=f"a difference of {size:.2g}",
                remedy="Pass the tensors that forward reads as arguments. Use the results of "
                "operations in place, as in w = w.clamp_(0), and ask for no type, as in "
                "isinstance(x, Tensor).",
            )

    def pieces(
        self, pieces: Sequence[Any], inputs: PassInputs, context: MessageContext | NativeContext
    ) -> None:
        """Compare each layer on all `pieces`, chunks or micro-batches, with the plain one."""
        context.leaves = inputs
        for segment, given, sources, outputs, gradients in self._plain_layers:
            parts = [self._part(given, piece, inputs) for piece in pieces]
            with self._refusing_errors():
                within = intercept(self._found.within([segment.module]), context)
                with within, kept_buffers([segment]):
                    for piece, part in zip(pieces, parts, strict=True):
                        run_segments([segment], part, piece, context)
                ours = [self._rows(name, pieces, parts, inputs) for name in segment.outputs]
                beside = [one for name, one in given.items() if name not in self._leaves]
                size = _difference(zip(ours, outputs, strict=True), _OF_VALUES, beside)
            self._refuse_if("values", segment, size)  # on a GPU, index errors are met above
            grads = zip(_gradients(ours, sources), gradients, strict=True)
            self._refuse_if("gradients", segment, _difference(grads, _OF_GRADIENTS))

    @cached_property
    def _plain_layers(self) -> list[_Plain]:
        """The layers of the plain module, run one by one on values that the earlier ones return."""
        found, values, context = list[_Plain](), self._named(self._call), NativeContext(1)
        for segment in self._layers.segments:
            given = {name: values[name] for name in segment.inputs}
            sources = [*_trained(segment.module), *filter(needs_grad, given.values())]
            local = {n: one.clone() if needs_grad(one) else one for n, one in given.items()}
            within = intercept(self._found.within([segment.module]), context)
            with within, kept_buffers([segment]):
                run_segments([segment], local, None, context)
            outputs = [local[name] for name in segment.outputs]
            gradients = _gradients(outputs, sources)
            found.append(_Plain(segment, given, sources, outputs, gradients))
            for name in set(segment.outputs) - self._leaves:
                values[name] = local[name].detach().requires_grad_(local[name].requires_grad)
        return found

    def _part(self, given: Mapping[str, Any], piece: Any, inputs: PassInputs) -> dict[str, Any]:
        """Return a piece of each value; of those that need gradients, as autograd sees it."""
        plain = {n for n, one in given.items() if n in self._leaves and not needs_grad(one)}
        parts = inputs.slice(piece, plain)
        for name in given.keys() - plain:
            value, dim = self._layers.values[name], self._layers.values[name].nodes_in or 0
            is_whole = value.row_kind is None
            places = None if is_whole else inputs.places(piece, value)
            parts[name] = given[name] if is_whole else given[name].index_select(dim, places)
        return parts

    def _named(self, call: Call) -> dict[str, Any]:
        """Return the leaves of `call`, and the number of graphs, by the names in the trace."""
        named: dict[str, Any] = {f"leaf_{slot}": leaf for slot, leaf in enumerate(call.leaves)}
        return named if self._num_graphs is None else named | {NUM_GRAPHS: self._num_graphs}

    def _rows(
        self, name: str, pieces: Sequence[Any], parts: Sequence[Mapping[str, Any]], inputs: Any
    ) -> Tensor:
        """Return a value of all pieces in the user's order; it is differentiable."""
        value = self._layers.values[name]
        rows = torch.cat([one[name] for one in parts])
        places = torch.cat([inputs.places(piece, value) for piece in pieces])
        return rows.new_zeros(inputs.num_places(value), *rows.shape[1:]).index_copy(0, places, rows)

    def _refuse_if(self, what: str, segment: Segment, size: float | None) -> None:
        if size is not None:
            layer = LayerNames(self._module).of(segment)
            raise UnsupportedError(
                expected=f"the model to compute the same {what} {self._words.both}",
                found=f"a difference of {size:.2g} that begins in or next to layer '{layer}'",
                remedy=self._words.remedy,
            )

    @contextmanager
    def _refusing_errors(self) -> Iterator[None]:
        """Refuse a model that fails within the block."""
        try:
            yield
        except (UnsupportedError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # what user code raises on a part of the graph
            line = at(line_and_function(error)[0])
            raise UnsupportedError(
                expected=f"the model to run on {self._words.part}",
                found=f"{type(error).__name__}: {first_line(error)}{line}",
                remedy=self._words.remedy,
            ) from error


@contextmanager
def _small_run(module: nn.Module, device: str, with_gradients: bool) -> Iterator[None]:
    """Run without random numbers and zeros, and leave the module as it was."""
    with (
        undisturbed(module),
        deterministic(),
        _without_zeros(module),
        without_memory(find_convs(module)),
        torch.autocast(device, enabled=False),
        torch.set_grad_enabled(with_gradients),
    ):
        yield


@contextmanager
def _without_zeros(module: nn.Module) -> Iterator[None]:
    """Replace weights and buffers that are all 0 within the block: they hide what they multiply."""
    statistics = _statistics(module)
    held = [one for one in (*module.parameters(), *module.buffers()) if id(one) not in statistics]
    dense = [one for one in held if one.is_floating_point() and one.layout is torch.strided]
    zeros = [(one, one.data) for one in dense if not one.any()]
    for one, old in zeros:
        one.data = torch.linspace(0.5, 1, one.numel()).view(one.shape).to(old)
    try:
        yield
    finally:
        for one, old in zeros:
            one.data = old


def _statistics(module: nn.Module) -> set[int]:
    """Return ids of the running statistics of norms."""
    found = find_layers(module)
    norms = (*found.norms.values(), *found.batch_norms.values())
    return {id(buffer) for norm in norms for buffer in norm.buffers()}


def _in_full(call: Call, module: nn.Module) -> Call:
    """Cast half-precision leaves to float32 if weights are float32: the check has no autocast."""
    if not any(p.dtype == torch.float32 for p in module.parameters()):
        return call
    is_half = [leaf.dtype in _HALF for leaf in call.leaves]
    leaves = [
        leaf.detach().float().requires_grad_(leaf.requires_grad) if half else leaf
        for leaf, half in zip(call.leaves, is_half, strict=True)
    ]
    return replace(call, leaves=tuple(leaves))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _difference(
    pairs: Iterable[tuple[Tensor | None, Tensor | None]],
    tolerances: Mapping[torch.dtype, tuple[float, float]],
    beside: Iterable[Tensor] = (),
) -> float | None:
    """Return the norm of the first difference that is more than rounding, or None.

    The second of a pair is exact; None is zero. `beside`: tensors that the pairs are computed from.
    """
    both = [(_filled(a, b), _filled(b, a)) for a, b in pairs]
    if any(ours.shape != exact.shape for ours, exact in both):
        return float("inf")
    finite = [(a[b.isfinite()], b[b.isfinite()]) for a, b in both]  # skip NaN of the module
    norms = [_norm(exact) for _, exact in finite]
    largest = max([*norms, *map(_norm, beside)], default=0.0)
    for (ours, exact), norm in zip(finite, norms, strict=True):
        difference = _norm(ours.double() - exact.double())
        of_norm, of_largest = tolerances.get(exact.dtype, (0.0, 0.0))
        if not difference <= of_norm * norm + of_largest * largest:
            return difference
    return None


def _norm(tensor: Tensor) -> float:
    return float(_as_real(tensor).double().norm())


def _as_real(tensor: Tensor) -> Tensor:
    """Return `tensor` as a dense, real tensor; complex numbers become pairs."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _filled(tensor: Tensor | None, other: Tensor | None) -> Tensor:
    if tensor is not None:
        return _as_real(tensor)
    return torch.zeros(()) if other is None else torch.zeros_like(_as_real(other))


def _gradients(roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients of `wanted` for the same gradients of `roots` in each run; None for zero."""
    ends = [(root, _given(root, i)) for i, root in enumerate(roots) if root.requires_grad]
    needed = [tensor for tensor in wanted if tensor.requires_grad]
    if not ends or not needed:
        return [None] * len(wanted)
    starts, numbers = [root for root, _ in ends], [given for _, given in ends]
    found = torch.autograd.grad(starts, needed, numbers, retain_graph=True, allow_unused=True)
    by_tensor = dict(zip(map(id, needed), found, strict=True))
    return [by_tensor.get(id(tensor)) for tensor in wanted]


def _given(end: Tensor, index: int) -> Tensor:
    """Return numbers shaped like `end` that differ in each element, and on average in each chunk.

    Chunks hold the nodes in turn. A mean over the nodes of one differs from the mean over all.
    """
    places = torch.arange(end.numel(), dtype=torch.float64, device=end.device)
    nodes = places.div(max(end[:1].numel(), 1) if end.dim() else 1, rounding_mode="floor")
    return ((places.square() + index).cos() + nodes % NUM_CHUNKS - 1).view(end.shape).to(end.dtype)


def _check_buffers(module: nn.Module, before: dict[str, Tensor], *, may_write: bool) -> None:
    """Restore buffers from `before`. Unless `may_write`, refuse a forward that has changed some.

    Norms may always change their statistics.
    """
    known, named = _statistics(module), module.named_buffers()
    changed = [n for n, b in named if id(b) not in known and _bits(b) != _bits(before[n])]
    restore_buffers(module, before)
    if changed and not may_write:
        raise UnsupportedError(
            expected="a forward pass that changes no buffer of the pipelined module",
            found=f"a change of {', '.join(changed)}",
            remedy="Running statistics and power iterations would be updated once per chunk. "
            "Replace the layer, or train with num_chunks=1.",
        )


def _bits(tensor: Tensor) -> bytes:
    """Return the numbers of a dense tensor, NaN as well."""
    if tensor.layout is not torch.strided:
        return b""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _check_structure(ours: Any, theirs: Any) -> None:
    """Refuse layers whose output structure differs from forward's."""
    found, expected = _structure(ours), _structure(theirs)
    if found != expected:
        raise UnsupportedError(
            expected=f"'pipeline_layers' to return what forward returns: {expected}",
            found=str(found),
            remedy="End 'pipeline_layers' with the outputs of forward.",
        )


def _structure(output: Any) -> Any:
    """Return `output` with "tensor" in place of each tensor."""
    if isinstance(output, Mapping):
        return {key: _structure(item) for key, item in output.items()}
    if isinstance(output, list | tuple):
        return [_structure(item) for item in output]
    return "tensor" if isinstance(output, Tensor) else repr(output)
