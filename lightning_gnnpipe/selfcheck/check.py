"""Checks the traced layers against the plain module on a small sample, before training.

Values and gradients must be equal: of one graph in chunks, whose embeddings are never stale here,
and of a few graphs in one micro-batch and in two. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks import BatchInputs, PlannedInputs
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import Chunk, plan_from_assignment, plan_micro_batches
from lightning_gnnpipe.layers import (
    NativeContext,
    find_convs,
    find_layers,
    intercept,
    without_memory,
)
from lightning_gnnpipe.methods import flatten
from lightning_gnnpipe.passing import replace_attributes
from lightning_gnnpipe.report import LayerNames
from lightning_gnnpipe.selfcheck.compare import (
    OF_GRADIENTS,
    Gradients,
    check_buffers,
    check_structure,
    difference_of,
    gradient_difference,
    gradients,
    in_full,
    refusing_errors,
)
from lightning_gnnpipe.selfcheck.trial import NO_CHECKPOINTS, LiveContext, NoRandomness, Run
from lightning_gnnpipe.stages import (
    Layers,
    Segment,
    draw_sample,
    line_of_node,
    strip_root,
    undisturbed,
)
from lightning_gnnpipe.user_code import at

NUM_CHUNKS = 3
_OF_CHUNKS = (
    "Code outside of message passing must treat each node's row by itself. In a layer of your own "
    "read rows of sources in message(self, x_j), not as x[row], and normalise with gcn_norm. Pass "
    "degrees to forward, pool behind the last layer, or train with num_chunks=1."
)
_OF_BATCHES = (
    "The model must treat each graph by itself. Normalise and pool with the batch vector, compare "
    "graphs in training_step, or train with num_chunks=1."
)


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

    `on_chunks`: compare chunks as well. `with_gradients`: compare gradients as well.
    """
    sample = draw_sample(module, call, inputs)
    small = replace(call, leaves=in_full(sample.leaves, module), num_nodes=None)
    kinds = replace(
        inputs,
        num_nodes=sample.num_nodes,
        edge_index=sample.edge_index,
        edge_sizes=sample.edge_sizes,
    )
    device = sample.edge_index.device
    assignment = torch.arange(kinds.num_nodes) % min(NUM_CHUNKS, kinds.num_nodes)
    plan = plan_from_assignment(kinds.edge_index.cpu(), kinds.num_nodes, assignment)
    plan = plan.with_edge_sets(kinds.edge_sizes).to(device)
    with _small_run(module, device.type, with_gradients), _without_zeros(module):
        if layers.whole is not None:
            with torch.no_grad():
                _check_trace(module, layers, call)
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        expected = layers.run_plain(module, small)
        exact = gradients(flatten(expected), [*_trained(module), *_inputs(small)])
        check_buffers(module, before)
        check = _Chunks(module, layers, small, kinds, LiveContext(plan))
        whole = check.run(plan.whole.chunks, expected, {})
        run = check.run(plan.chunks, expected, check.values(whole)) if on_chunks else whole
        if with_gradients and not any(_is_half(t) for t in (*_trained(module), *_inputs(small))):
            check.compare_gradients(run, exact)


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
    sample = draw_sample(module, call, inputs)
    assert sample.graphs is not None
    small = replace(call, leaves=in_full(sample.leaves, module), slices={})
    kinds = replace(inputs, num_nodes=sample.num_nodes, graphs=sample.graphs)
    device = sample.graphs.graph_of_node.device.type
    found, ends = find_layers(module), layers.segments[-1].ends
    weights = _trained(module)
    with (
        _small_run(module, device, with_gradients),
        refusing_errors("a few graphs of the batch", _OF_BATCHES),
        ExitStack() as stack,
    ):
        if in_parts:
            for norm in found.batch_norms.values():
                stack.enter_context(replace_attributes(norm, {"training": False}))
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with intercept(found, NativeContext(1)):
            result = small.run(module, small.leaves, sample.graphs.num_graphs)
        expected = layers.pick_outputs(flatten(result))
        check_structure(layers.rebuild_output(expected), result)
        exact = gradients(expected, [*weights, *_inputs(small)])
        check_buffers(module, before)
        for num_chunks in (1, 2) if in_parts else (1,):
            plan = plan_micro_batches(sample.graphs.work(), sample.graphs.sizes, num_chunks)
            context = NativeContext(plan.num_chunks)
            with intercept(found, context):
                run = Run(layers, BatchInputs(small, kinds, plan), plan.chunks, context)
                ours = [run.rows(name) for name in layers.outputs]
                grads = run.gradients(ours, weights, small.leaves)
            for name, one, other in zip(layers.outputs, ours, expected, strict=True):
                output = f"an output{at(line_of_node(ends[name]))}"
                if one.shape != other.shape:
                    shapes = f"shape {list(one.shape)} instead of {list(other.shape)}"
                    raise _refuse_batch(f"{shapes} of {output}")
                if (size := difference_of(one, other)) is not None:
                    raise _refuse_batch(f"a difference of {size:.2g} in {output}")
            size = gradient_difference(zip(grads, exact, strict=True))
            if size is not None:
                raise _refuse_batch(f"a difference of {size:.2g} in a gradient")


def norms_without_batch(layers: Layers) -> set[str]:
    """Return names of modules called with at most one tensor, so without a batch vector."""
    found = set()
    for segment in layers.segments:
        for node in segment.module.graph.nodes:
            given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
            if node.op == "call_module" and len(given) < 2:
                found.add(strip_root(str(node.target)))
    return found


class _Chunks:
    """Compares runs over the chunks of a small graph, and names the layer where they differ."""

    def __init__(
        self, module: nn.Module, layers: Layers, call: Call, kinds: Inputs, context: LiveContext
    ) -> None:
        self._module, self._layers, self._call, self._context = module, layers, call, context
        self._names, self._found = LayerNames(module), find_layers(module)
        context.leaves = self._inputs = PlannedInputs(context.all_chunks)
        self._inputs.load(call, kinds)
        rows = {name for name, value in layers.values.items() if value.kind is Kind.NODE}
        self._segment_of: dict[str, Segment] = {}  # of each value of nodes, and each output
        for segment in layers.segments:
            for name in segment.outputs:
                if name in rows or name in layers.outputs:
                    self._segment_of.setdefault(name, segment)

    def run(self, chunks: Sequence[Chunk], output: object, values: Mapping[str, Tensor]) -> Run:
        """Run all layers; compare with `values`, then with the module's `output`."""
        with refusing_errors("a chunk of the graph", _OF_CHUNKS):
            with intercept(self._found, self._context):
                run = Run(self._layers, self._inputs, chunks, self._context)
                ours = self.values(run)
            for name, exact in values.items():  # on a GPU, an index error is met here
                self._compare(name, ours[name], exact)
        found = self._output(run)
        check_structure(found, output)
        for one, exact in zip(flatten(found), flatten(output), strict=True):
            place = next((name for name in self._layers.outputs if ours[name] is one), None)
            self._compare(place or self._layers.outputs[-1], one, exact)
        return run

    def values(self, run: Run) -> dict[str, Tensor]:
        """Return the values of nodes, and the outputs, of all layers."""
        return {name: run.rows(name) for name in self._segment_of}

    def compare_gradients(self, run: Run, exact: Gradients) -> None:
        """Compare the gradients of weights, last layers first, then of the inputs."""
        layers, weights = self._layers, _trained(self._module)
        ours = run.gradients(flatten(self._output(run)), weights, self._call.leaves)
        pairs = list(zip(ours, exact, strict=True))
        of_weight = dict(zip(map(id, weights), pairs, strict=False))
        parts = [
            (segment, [of_weight[id(p)] for p in _trained(segment.module)])
            for segment in reversed((*layers.segments, *filter(None, [layers.head])))
        ]  # a wrong gradient spreads to earlier layers
        for segment, some in (*parts, (layers.segments[0], pairs[len(weights) :])):
            if (size := gradient_difference(some)) is not None:
                raise self._refuse("gradients", segment, size)

    def _output(self, run: Run) -> Any:
        rows = [run.rows(name) for name in self._layers.outputs]
        return self._layers.rebuild_output(rows, self._call.leaves)

    def _compare(self, name: str, ours: Tensor, exact: Tensor) -> None:
        if (size := difference_of(ours, exact)) is not None:
            raise self._refuse("values", self._segment_of[name], size)

    def _refuse(self, what: str, segment: Segment, size: float) -> UnsupportedError:
        layer = self._names.of(segment)
        return UnsupportedError(
            expected=f"the model to compute the same {what} on chunks as on the whole of a small "
            "graph",
            found=f"a difference of {size:.2g} that begins in or next to layer '{layer}'",
            remedy=_OF_CHUNKS,
        )


@contextmanager
def _small_run(module: nn.Module, device: str, with_gradients: bool) -> Iterator[None]:
    """Run without random numbers, and leave the module as it was."""
    with (
        undisturbed(module),
        NoRandomness(),
        replace_attributes(*NO_CHECKPOINTS),
        without_memory(find_convs(module)),
        torch.autocast(device, enabled=False),
        torch.set_grad_enabled(with_gradients),
    ):
        yield


@contextmanager
def _without_zeros(module: nn.Module) -> Iterator[None]:
    """Open gates within the block: weights that are all 0 would hide what they multiply."""
    closed = [p for p in module.parameters() if p.is_floating_point() and not p.any()]
    for weight in closed:
        weight.data.copy_(torch.linspace(0.5, 1, weight.numel()).view(weight.shape))
    try:
        yield
    finally:
        for weight in closed:
            weight.data.zero_()


def _check_trace(module: nn.Module, layers: Layers, call: Call) -> None:
    """Compare the trace with forward on the whole graph: forward does not run on a part of it."""
    args, kwargs = call.arguments
    expected = flatten(getattr(module, call.method)(*args, **kwargs))
    for ours, theirs in zip(flatten(layers.run_plain(module, call)), expected, strict=True):
        if (size := difference_of(ours, theirs)) is not None:
            raise UnsupportedError(
                expected="forward to compute the same as its trace by torch.fx",
                found=f"a difference of {size:.2g}",
                remedy="Pass the tensors that forward reads as arguments, or train with "
                "num_chunks=1.",
            )


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _inputs(call: Call) -> list[Tensor]:
    return [leaf for leaf in call.leaves if leaf.requires_grad]


def _is_half(tensor: Tensor) -> bool:
    """Whether gradients over many layers are mostly rounding."""
    return tensor.dtype.to_real() not in OF_GRADIENTS


def _refuse_batch(found: str) -> UnsupportedError:
    return UnsupportedError(
        expected="the model to compute the same on micro-batches as on the whole batch",
        found=found,
        remedy=_OF_BATCHES,
    )
