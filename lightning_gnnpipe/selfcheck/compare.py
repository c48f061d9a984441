"""Compares values and gradients of two runs, with a tolerance for rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.errors import UnsupportedError, first_line
from lightning_gnnpipe.layers import find_layers
from lightning_gnnpipe.stages import restore_buffers
from lightning_gnnpipe.user_code import at, line_of

_OF_VALUES = {torch.float64: 1e-8, torch.float32: 1e-3}
# Relative to the gradient's norm. Rounding may flip a rectifier in one row of many.
OF_GRADIENTS = {torch.float64: 1e-8, torch.float32: 5e-2}
_ROUGH = 0.2  # half precision, relative to the norm
_FLOOR = 0.1  # share of the largest gradient; smaller ones are mostly rounding

Gradients = Sequence[Tensor | None]


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
    ours, theirs = _as_real(ours.detach()), _as_real(theirs.detach())
    tolerance = _OF_VALUES.get(theirs.dtype)
    ours, theirs = ours.double(), theirs.double()
    if tolerance is not None:
        is_same = torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        finite = theirs.isfinite()  # half precision: rounding adds up in single elements
        is_same = bool((ours - theirs)[finite].norm() <= _ROUGH * theirs[finite].norm())
    return None if is_same else float((ours - theirs).abs().nan_to_num().max())


def gradient_difference(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float | None:
    """Return the norm of the first difference that is more than rounding, or None.

    The second of a pair is the exact gradient; None is zero.
    """
    both = [(_as_real(_filled(a, b)).double(), _as_real(_filled(b, a))) for a, b in pairs]
    finite = [(a[b.isfinite()], b[b.isfinite()]) for a, b in both]  # skip NaN of the model
    largest = max((float(b.double().norm()) for _, b in finite), default=0.0)
    for ours, theirs in finite:
        tolerance = OF_GRADIENTS.get(theirs.dtype, _ROUGH)
        difference = float((ours - theirs.double()).norm())
        floor = tolerance * _FLOOR * largest
        if not difference <= tolerance * float(theirs.double().norm()) + floor:
            return difference
    return None


def gradients(roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients of `wanted` for the same gradients of `roots` in each run; None for zero."""
    ends = [root for root in roots if root.requires_grad]
    needed = [tensor for tensor in wanted if tensor.requires_grad]
    if not ends or not needed:
        return [None] * len(wanted)
    found = torch.autograd.grad(ends, needed, list(map(_given, ends)), allow_unused=True)
    by_tensor = dict(zip(map(id, needed), found, strict=True))
    return [by_tensor.get(id(tensor)) for tensor in wanted]


def _given(end: Tensor) -> Tensor:
    """Return numbers shaped like `end` that differ in each element, and on average in each chunk.

    Chunks hold the nodes in turn (`NUM_CHUNKS`). A mean over the nodes of one then differs from the
    mean over all nodes.
    """
    numbers = torch.arange(end.numel(), dtype=torch.float64, device=end.device).view(end.shape)
    width = max(end[:1].numel(), 1) if end.dim() else 1
    nodes = numbers.div(width, rounding_mode="floor")
    return (numbers.cos() + 2 * (2 * torch.pi / 3 * nodes).cos()).to(end.dtype)


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


@contextmanager
def refusing_errors(part: str, remedy: str) -> Iterator[None]:
    """Refuse a model that fails within the block; `part` names the data it runs on."""
    try:
        yield
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            expected=f"the model to run on {part}",
            found=f"{type(error).__name__}: {first_line(error)}{at(line_of(error))}",
            remedy=remedy,
        ) from error


def _structure(output: Any) -> Any:
    """Return `output` with "tensor" in place of each tensor."""
    if isinstance(output, Mapping):
        return {key: _structure(item) for key, item in output.items()}
    if isinstance(output, list | tuple):
        return [_structure(item) for item in output]
    return "tensor" if isinstance(output, Tensor) else repr(output)


def _as_real(tensor: Tensor) -> Tensor:
    """Return `tensor` as a dense, real tensor; complex numbers become pairs."""
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _filled(grad: Tensor | None, other: Tensor | None) -> Tensor:
    if grad is not None:
        return grad
    return torch.zeros(()) if other is None else torch.zeros_like(other)
