"""Numbers of tensors by content; a tensor that was not written to since is not read again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.graph import tensor_fingerprint

_NUM_SAMPLED = 1024


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor whose number was taken.

    Attributes:
        tensor: The tensor, for as long as anything else keeps it.
        version: How often it had been written to.
        sample: Some of its elements; None where writes that torch does not count are not looked
            for.
        number: Its number.
    """

    tensor: weakref.ref[Tensor]
    version: int
    sample: Tensor | None
    number: int


class ContentNumbers:
    """Numbers of tensors by shape, dtype and content, the same in every process.

    torch does not count writes through `Tensor.data` or a NumPy array of the same memory. On the
    CPU a sample of the elements is compared as well, which finds those that change many of them.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, tensor: Tensor) -> int:
        """Return a signed 64-bit number of a dense tensor of any shape."""
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            version = version_of(tensor)
            is_same = version == known.version and version >= 0
            if is_same and (known.sample is None or torch.equal(known.sample, sample_of(tensor))):
                return known.number
        number = tensor_fingerprint(tensor)
        self._keep(tensor, number)
        return number

    def _keep(self, tensor: Tensor, number: int) -> None:
        key, known = id(tensor), self._known

        def forget(ref: weakref.ref[Tensor]) -> None:
            if key in known and known[key].tensor is ref:
                del known[key]

        sample = sample_of(tensor).clone() if tensor.device.type == "cpu" else None
        known[key] = _Known(weakref.ref(tensor, forget), version_of(tensor), sample, number)


def sample_of(tensor: Tensor) -> Tensor:
    """Return some elements of the tensor, spread over all of it, bit by bit."""
    flat = tensor.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat.flatten()
    step = max(1, -(-flat.numel() // _NUM_SAMPLED))
    while gcd(step, flat.numel()) > 1 and step < flat.numel():
        step += 1  # or it would see the same columns of all rows
    return _bits(flat[::step])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values: Tensor) -> Tensor:
    """Return `[num_values]` as integers: a NaN equals itself then, and -0.0 is not 0.0."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype is torch.bool or not values.is_floating_point():
        return values
    return values.contiguous().view(_INTEGERS[values.element_size()])
