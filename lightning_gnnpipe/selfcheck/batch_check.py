"""Checks the traced layers on a few graphs, in one micro-batch and in two, before training.

Outputs and gradients must equal the plain module's. Dropout is off, and BatchNorm uses its running
statistics.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks import BatchInputs, run_segments
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import BatchPlan, plan_micro_batches
from lightning_gnnpipe.layers import Intercepted, NativeContext, find_layers, intercept
from lightning_gnnpipe.passing import replace_attributes
from lightning_gnnpipe.selfcheck.gradient_check import (
    add_grad,
    find_difference,
    gradients,
    some_gradient,
    trained,
)
from lightning_gnnpipe.selfcheck.trial import NoRandomness, flatten, refusing_errors
from lightning_gnnpipe.selfcheck.value_check import (
    check_buffers,
    check_structure,
    difference_of,
    in_full,
)
from lightning_gnnpipe.stages import (
    Layers,
    draw_sample,
    leaves_of,
    line_of_node,
    strip_root,
    undisturbed,
)
from lightning_gnnpipe.user_code import at

REMEDY = (
    "The model must treat each graph by itself. Normalise and pool with the batch vector, compare "
    "graphs in training_step, or train with num_chunks=1."
)

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2}  # of gradients


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

    `in_parts`: compare two micro-batches as well. `with_gradients`: compare gradients as well.
    """
    sample = draw_sample(module, call, inputs)
    assert sample.graphs is not None
    small = replace(call, leaves=in_full(sample.leaves, module), slices={})
    kinds = replace(inputs, num_nodes=sample.num_nodes, graphs=sample.graphs)
    device = sample.graphs.graph_of_node.device.type
    found = find_layers(module)
    with (
        undisturbed(module),
        NoRandomness(),
        torch.autocast(device, enabled=False),
        torch.set_grad_enabled(with_gradients),
        refusing_errors("a few graphs of the batch", REMEDY),
        ExitStack() as stack,
    ):
        if in_parts:  # BatchNorm treats rows independently only by its running statistics
            for norm in found.batch_norms.values():
                stack.enter_context(replace_attributes(norm, {"training": False}))
        expected = _run_plainly(module, layers, small, sample.graphs.num_graphs, found)
        for num_chunks in (1, 2) if in_parts else (1,):
            plan = plan_micro_batches(sample.graphs.work(), sample.graphs.sizes, num_chunks)
            ours = _run_layers(module, layers, small, kinds, plan, found)
            _compare_all(layers, ours, expected)


def norms_without_batch(layers: Layers) -> set[str]:
    """Return names of modules called with at most one tensor, so without a batch vector."""
    found = set()
    for segment in layers.segments:
        for node in segment.module.graph.nodes:
            given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
            if node.op == "call_module" and len(given) < 2:
                found.add(strip_root(str(node.target)))
    return found


Results = tuple[list[Tensor], list[Tensor | None]]


def _run_plainly(
    module: nn.Module, layers: Layers, call: Call, num_graphs: int, found: Intercepted
) -> Results:
    """Return the module's outputs, and the gradients of its parameters and leaves."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with intercept(found, NativeContext(1)):
        result = call.run(module, call.leaves, num_graphs)
    outputs = layers.pick_outputs(flatten(result))
    check_structure(layers.rebuild_output(outputs), result)
    wanted = [*trained(module), *(leaf for leaf in call.leaves if leaf.requires_grad)]
    grads = gradients(outputs, wanted, [some_gradient(output) for output in outputs])
    check_buffers(module, before)
    return [output.detach() for output in outputs], grads


def _run_layers(
    module: nn.Module,
    layers: Layers,
    call: Call,
    kinds: Inputs,
    plan: BatchPlan,
    found: Intercepted,
) -> Results:
    """Return outputs and gradients of the layers, run on each micro-batch."""
    inputs, context = BatchInputs(call, kinds, plan), NativeContext(plan.num_chunks)
    names = leaves_of(layers.segments)
    known = [layers.values[name] for name in layers.outputs]
    device = kinds.edge_index.device
    outputs = [
        torch.zeros(inputs.num_places(value), *value.row_shape, dtype=value.dtype, device=device)
        for value in known
    ]
    cotangents = [some_gradient(output) for output in outputs]
    parameters = trained(module)
    totals: list[Tensor | None] = [None] * len(parameters)
    with intercept(found, context):
        for chunk in plan.chunks:
            leaves = inputs.slice(chunk, names)
            values: dict[str, Any] = dict(leaves)
            run_segments(layers.segments, values, chunk, context)
            roots = [values[name] for name in layers.outputs]
            places = [inputs.places(chunk, value) for value in known]
            for output, place, root in zip(outputs, places, roots, strict=True):
                output[place] = root.detach()
            sources = [t for t in leaves.values() if isinstance(t, Tensor) and t.requires_grad]
            given = [c[place] for c, place in zip(cotangents, places, strict=True)]
            grads = gradients(roots, [*parameters, *sources], given)
            totals = list(map(add_grad, totals, grads))
            for source, grad in zip(sources, grads[len(parameters) :], strict=True):
                source.grad = grad
            inputs.add_grads(chunk, leaves)
    slots = [i for i, leaf in enumerate(call.leaves) if leaf.requires_grad]
    return outputs, [*totals, *(inputs.take_grad(slot) for slot in slots)]


def _compare_all(layers: Layers, ours: Results, theirs: Results) -> None:
    ends = layers.segments[-1].ends
    for name, a, b in zip(layers.outputs, ours[0], theirs[0], strict=True):
        output = f"an output{at(line_of_node(ends[name]))}"
        if a.shape != b.shape:
            raise _refuse(f"shape {list(a.shape)} instead of {list(b.shape)} of {output}")
        if (size := difference_of(a, b)) is not None:
            raise _refuse(f"a difference of {size:.2g} in {output}")
    size = find_difference(zip(ours[1], theirs[1], strict=True), _TOLERANCE)
    if size is not None:
        raise _refuse(f"a difference of {size:.2g} in a gradient")


def _refuse(found: str) -> UnsupportedError:
    return UnsupportedError(
        expected="the model to compute the same on micro-batches as on the whole batch",
        found=found,
        remedy=REMEDY,
    )
