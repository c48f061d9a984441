"""Checks values and gradients of the traced layers on a small sample, against the plain module.

The layers run on the whole sample, then on its chunks with halos from that run. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers import find_convs, find_layers, without_memory
from lightning_gnnpipe.selfcheck.gradient_check import check_gradients
from lightning_gnnpipe.selfcheck.trial import (
    NoRandomness,
    Trial,
    as_real,
    flatten,
    refuse_difference,
)
from lightning_gnnpipe.stages import Layers, draw_sample, restore_buffers, undisturbed

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_ROUGH = 0.2  # half precision, relative to the norm


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
    leaves = in_full(sample.leaves, module)
    small = replace(call, leaves=leaves, num_nodes=None)
    kinds = replace(
        inputs,
        num_nodes=sample.num_nodes,
        edge_index=sample.edge_index,
        edge_sizes=sample.edge_sizes,
    )
    device = sample.edge_index.device.type
    with (
        undisturbed(module),
        NoRandomness(),
        without_memory(find_convs(module)),
        torch.autocast(device, enabled=False),
    ):
        with torch.no_grad():
            if layers.whole is not None:
                _check_trace(module, layers, call)
            with _without_zeros(module):
                _check_values(module, layers, small, kinds, on_chunks=on_chunks)
        if with_gradients:
            with torch.enable_grad():
                check_gradients(module, layers, small, kinds, on_chunks=on_chunks)


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


def _check_values(
    module: nn.Module, layers: Layers, call: Call, kinds: Inputs, *, on_chunks: bool
) -> None:
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    expected = layers.run_plain(module, call)
    check_buffers(module, before)
    trial = Trial(module, layers, call, kinds)
    names = {name: trial.names.of(segment) for name, segment in trial.layer_of_value.items()}
    reference = trial.forward(trial.plan.whole.chunks)
    found = [reference[name] for name in layers.outputs]
    output = layers.rebuild_output(found, call.leaves)
    check_structure(output, expected)
    for ours, theirs in zip(flatten(output), flatten(expected), strict=True):
        place = next((n for n, one in zip(layers.outputs, found, strict=True) if one is ours), None)
        _compare(names[place or layers.outputs[-1]], ours, theirs)
    chunked = trial.forward(trial.plan.chunks) if on_chunks else {}
    for name, values in chunked.items():
        _compare(names[name], values, reference[name])


def in_full(leaves: Sequence[Tensor], module: nn.Module) -> tuple[Tensor, ...]:
    """Cast half-precision leaves to float32 if weights are float32: the check has no autocast."""
    has_full = any(p.dtype == torch.float32 for p in module.parameters())
    return tuple(
        leaf.detach().float().requires_grad_(leaf.requires_grad)
        if has_full and leaf.dtype in (torch.bfloat16, torch.float16)
        else leaf
        for leaf in leaves
    )


def difference_of(ours: Tensor, theirs: Tensor) -> float | None:
    """Return the largest difference of two results; None if they are the same up to rounding."""
    ours, theirs = as_real(ours), as_real(theirs)
    tolerance = _TOLERANCE.get(theirs.dtype)
    ours, theirs = ours.double(), theirs.double()
    if tolerance is not None:
        is_same = torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        finite = theirs.isfinite()  # half precision: rounding adds up in single elements
        is_same = bool((ours - theirs)[finite].norm() <= _ROUGH * theirs[finite].norm())
    return None if is_same else float((ours - theirs).abs().nan_to_num().max())


def _compare(layer: str, ours: Tensor, theirs: Tensor) -> None:
    if (size := difference_of(ours, theirs)) is not None:
        raise refuse_difference("values", layer, size)


def check_buffers(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Refuse a forward that changed buffers outside of norms; restore all from `before`."""
    found = find_layers(module)
    norms = (*found.norms.values(), *found.batch_norms.values())
    known = {id(buffer) for norm in norms for buffer in norm.buffers()}
    changed = [
        n for n, b in module.named_buffers() if id(b) not in known and not torch.equal(b, before[n])
    ]
    restore_buffers(module, before)
    if changed:
        raise UnsupportedError(
            expected="a forward pass that changes no buffer of the pipelined module",
            found=f"a change of {', '.join(changed)}",
            remedy="Running statistics and power iterations would be updated once per chunk. "
            "Replace the layer, or train with num_chunks=1.",
        )


def check_structure(ours: Any, theirs: Any) -> None:
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
