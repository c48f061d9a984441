"""Checks the traced layers on a few graphs, in one micro-batch and in two, before training.

Outputs and gradients must equal the plain module's. Dropout is off, and BatchNorm uses its running
statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks import BatchInputs, run_segments
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.graph import BatchPlan, plan_micro_batches
from lightning_gnnpipe.layers import Intercepted, NativeContext, find_layers, intercept
from lightning_gnnpipe.selfcheck.gradient_check import some_gradient
from lightning_gnnpipe.selfcheck.trial import NoRandomness, as_real, flatten, refusing_errors
from lightning_gnnpipe.selfcheck.value_check import check_buffers, check_structure, compare, in_full
from lightning_gnnpipe.stages import Layers, draw_sample, line_of_node, strip_root, undisturbed
from lightning_gnnpipe.user_code import at

REMEDY = (
    "Something looks at several graphs at once: normalise and pool with the batch vector, compute "
    "what joins graphs (a contrast between them, a rank) in training_step, or train with "
    "num_chunks=1."
)

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2}
_ROUGH = 0.2  # half precision


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
        _evaluating(found.batch_norms if in_parts else {}),
    ):
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
    args, kwargs = call.rebuild(call.leaves, num_graphs)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with intercept(found, NativeContext(1)):
        result = module.forward(*args, **kwargs)
    outputs = layers.pick_outputs(flatten(result))
    check_structure(layers.rebuild_output(outputs), result)
    wanted = [*_trained(module), *(leaf for leaf in call.leaves if leaf.requires_grad)]
    grads = _grads(outputs, wanted, [some_gradient(output) for output in outputs])
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
    names = {name for segment in layers.segments for name in segment.inputs}
    names = {name for name in names if name.startswith("leaf_")}
    known = [layers.values[name] for name in layers.outputs]
    outputs = [
        torch.zeros(inputs.num_places(value), *value.row_shape, dtype=value.dtype)
        for value in known
    ]
    outputs = [o.to(kinds.edge_index.device) for o in outputs]
    cotangents = [some_gradient(output) for output in outputs]
    parameters = _trained(module)
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
            grads = _grads(roots, [*parameters, *sources], given)
            for i, grad in enumerate(grads[: len(parameters)]):
                totals[i] = _sum(totals[i], grad)
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
        if not compare(a, b):
            size = float((as_real(a).double() - as_real(b).double()).abs().nan_to_num().max())
            raise _refuse(f"a difference of {size:.2g} in {output}")
    grads = [[None if g is None else as_real(g) for g in one[1]] for one in (ours, theirs)]
    largest = max((float(g.double().norm()) for g in grads[1] if g is not None), default=0.0)
    for one, other in zip(*grads, strict=True):
        known = [grad for grad in (one, other) if grad is not None]
        if not known:
            continue
        tolerance = _TOLERANCE.get(known[0].dtype, _ROUGH)
        first, second = (
            torch.zeros_like(known[0], dtype=torch.float64) if g is None else g.double()
            for g in (one, other)
        )
        difference = float((first - second)[second.isfinite()].norm())
        if not difference <= tolerance * (float(second.nan_to_num().norm()) + 0.1 * largest):
            raise _refuse(f"a difference of {difference:.2g} in a gradient")


def _grads(
    roots: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor | None]:
    reached = [(r, c) for r, c in zip(roots, cotangents, strict=True) if r.requires_grad]
    if not reached or not wanted:
        return [None] * len(wanted)
    ends, given = zip(*reached, strict=True)
    return list(torch.autograd.grad(ends, wanted, given, allow_unused=True))


def _trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return grad if total is None else total if grad is None else total + grad


@contextmanager
def _evaluating(norms: dict[str, nn.Module]) -> Iterator[None]:
    """Let BatchNorm use its running statistics, so that it treats rows independently."""
    before = {name: norm.training for name, norm in norms.items()}
    for norm in norms.values():
        norm.training = False
    try:
        yield
    finally:
        for name, norm in norms.items():
            norm.training = before[name]


def _refuse(found: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            expected="the model to give the same in micro-batches of a few graphs as plainly",
            found=found,
            remedy=REMEDY,
        )
    )
