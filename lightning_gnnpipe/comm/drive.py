"""One bit a value: the signs of rows that were turned at random, and one length a row.

A row of d channels is turned by a random orthogonal matrix, its channels' signs flipped before, and
is sent as the signs of what comes out, with one scale::

    y  = R (f * x)              f [d] signs, of each row its own;  R [d, d], of each message its own
    S  = |x|**2 / sum(|y_j|)
    x~ = f * (R^T (S sign(y)))  E[x~] = x;  E[|x~ - x|**2] = (pi / 2 - 1) |x|**2 for large d

R is uniform over all orthogonal matrices (Haar), so E[x~] points where x does, for whatever leaves
x in its place leaves the distribution of x~ as it is; and S is such that <x, x~> is |x|**2, always.
That is the error of 0.57 |x|**2 for any row. Rounding between a row's least and largest value (see
`low_bit`) has an error that grows with their distance: on rows of gradients, few values of which
are large, 5 to 16 |x|**2 with one bit.

Both ends draw R and the f from a seed that travels with the rows. Rows of more than 256 channels
are taken in equal parts, if there are such, each with a scale.

A row with a value that is infinite or not a number comes out as not a number, all of it. A row that
is longer than float32 can tell (3.4e38) comes out as not finite.

Source: DRIVE (arXiv 2105.08339), with a uniform random rotation and its unbiased scale. There all
of a vector has one rotation; the signs that differ from row to row keep the errors of rows apart
that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnnpipe.comm.packing import pack, unpack, unpack_table
from lightning_gnnpipe.comm.payload import Codec

_SEED_BYTES, _SCALE_BYTES = 8, 4
_MOST_CHANNELS, _LEAST_CHANNELS = 256, 64  # of a part
_LEAST = 2.0**-126  # whose inverse is finite
_BLOCK_CPU = 2**16  # values at a time: with all that they need, they stay in a cache of 1 MiB
_BLOCK_GPU = 2**24


class DriveCodec(Codec):
    """Sends one bit a value, and 32 a row of up to 256 channels.

    The payload is the seed, the scales of all rows, then the signs of all rows without gaps.
    """

    def __init__(self) -> None:
        super().__init__("drive")
        self._table = unpack_table(1)

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return _SEED_BYTES + _SCALE_BYTES * _count_rows(shape) + -(-prod(shape) // 8)

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        rows = tensor.contiguous().view(_count_rows(tensor.shape), -1)
        num_bytes = self._coded_bytes(tensor.shape, tensor.dtype)
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
        parts = _split(payload, rows)
        parts.seed.fill_(seed & 0xFFFFFFFF)
        turn = _Turn(rows, seed, self._table)
        for part, flips, scale, packed in _blocks(rows, turn.flips, parts.scales, parts.signs):
            values = part.to(torch.float32)
            largest = values.abs().amax(1, keepdim=True).clamp_(min=_LEAST)
            values = values / largest
            turned = turn.forth(values * turn.signs_of(flips, values))
            pack((turned >= 0).view(-1), 1, packed)
            length = values.square_().sum(1, keepdim=True)
            torch.div(length, turned.abs_().sum(1, keepdim=True).clamp_(min=_LEAST), out=scale)
            scale.mul_(largest)
        return payload

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        is_direct = out.dtype == torch.float32 and out.is_contiguous()
        values = (
            out if is_direct else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        )
        rows = values.view(_count_rows(out.shape), -1)
        parts = _split(payload, rows)
        turn = _Turn(rows, int(parts.seed), self._table)
        for part, flips, scale, packed in _blocks(rows, turn.flips, parts.scales, parts.signs):
            turned = turn.back(turn.signs_of(packed, part))
            torch.mul(turned.mul_(scale), turn.signs_of(flips, part), out=part)
        if not is_direct:
            out.copy_(values)


class _Turn:
    """How a message's rows, `[num_rows, num_channels]`, are turned: the same at both ends.

    Attributes:
        flips: The signs of all rows, a bit each, without gaps, uint8.
    """

    def __init__(self, rows: Tensor, seed: int, table: Tensor | None) -> None:
        generator = torch.Generator().manual_seed(seed & 0xFFFFFFFF)  # a GPU's has other numbers
        num_channels = rows.size(1)
        self._matrix = _draw_rotation(num_channels, generator).to(rows.device)
        words = torch.empty(-(-rows.numel() // 64), dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        self.flips = words.view(torch.uint8)[: -(-rows.numel() // 8)].to(rows.device)
        self._table = None if table is None else table.to(rows.device)

    def forth(self, rows: Tensor) -> Tensor:
        """Return `rows`, `[*, num_channels]`, float32, turned by R."""
        with torch.autocast(rows.device.type, enabled=False):
            return rows @ self._matrix.t()

    def back(self, rows: Tensor) -> Tensor:
        """Undo `forth`."""
        with torch.autocast(rows.device.type, enabled=False):
            return rows @ self._matrix

    def signs_of(self, packed: Tensor, like: Tensor) -> Tensor:
        """Return the bits, 1 or -1 each, float32 in the shape of `like`."""
        signs = torch.empty_like(like)
        unpack(packed, self._table, signs.view(-1))
        return signs.mul_(2).sub_(1)


class _Parts(NamedTuple):
    """Views of a payload.

    Attributes:
        seed: `[]`, int64.
        scales: `[num_rows, 1]`, float32.
        signs: One bit a value, uint8.
    """

    seed: Tensor
    scales: Tensor
    signs: Tensor


def _split(payload: Tensor, rows: Tensor) -> _Parts:
    """Return the parts of the payload of `rows`, `[num_rows, num_channels]`."""
    end = _SEED_BYTES + _SCALE_BYTES * rows.size(0)
    return _Parts(
        payload[:_SEED_BYTES].view(torch.int64)[0],
        payload[_SEED_BYTES:end].view(torch.float32).view(-1, 1),
        payload[end:],
    )


def _blocks(
    rows: Tensor, flips: Tensor, scales: Tensor, signs: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the arguments cut into blocks of rows, whose signs fill bytes."""
    num_values = _BLOCK_CPU if rows.device.type == "cpu" else _BLOCK_GPU
    block = min(rows.size(0), max(8, num_values // rows.size(1) // 8 * 8))
    num_bytes = -(-block * rows.size(1) // 8)
    sizes = ((rows, block), (flips, num_bytes), (scales, block), (signs, num_bytes))
    return zip(*(torch.split(tensor, size) for tensor, size in sizes), strict=True)


def _draw_rotation(size: int, generator: torch.Generator) -> Tensor:
    """Return an orthogonal matrix `[size, size]` of float32, uniform over all of them."""
    normal = torch.randn(size, size, dtype=torch.float32, generator=generator)
    matrix, upper = torch.linalg.qr(normal)
    return matrix * torch.where(upper.diagonal() < 0, -1.0, 1.0)  # uniform only so


def _count_rows(shape: Sequence[int]) -> int:
    """Return how many rows have a scale: the first dimension, times the parts of a row."""
    num_rows = shape[0] if shape else 1
    num_channels = prod(shape[1:])
    if num_channels <= _MOST_CHANNELS:
        return num_rows
    sizes = range(_MOST_CHANNELS, _LEAST_CHANNELS - 1, -1)
    part = next((size for size in sizes if num_channels % size == 0), num_channels)
    return num_rows * num_channels // part
