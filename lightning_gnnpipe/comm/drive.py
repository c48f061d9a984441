"""One bit a value: the signs of rows that were turned at random, and one length a row.

A row of d channels is turned by a random orthogonal matrix, its channels' signs flipped before, and
is sent as the signs of what comes out, with one scale::

    y  = R (f * x)              f [d] signs, of each row its own;  R [d, d]
    S  = |x|**2 / sum(|y_j|)
    x~ = f * (R^T (S sign(y)))  E[x~] = x

R is uniform over all orthogonal matrices (Haar), so E[x~] points where x does: whatever leaves x in
its place leaves the distribution of x~ as it is. And S is such that <x, x~> is |x|**2, always. The
squared error is (pi / 2 - 1) |x|**2 on average for large d, whatever the row, and less for small d.
Rounding between a row's least and largest value (see `low_bit`) has an error that grows with their
distance: on rows of gradients, few values of which are large, several times |x|**2 with one bit.

Both ends draw R and the f from a seed that travels with the rows; messages whose seeds differ in
their lowest 8 bits alone share R, which is the costly one to draw. All of this holds up to the
rounding of matrix products, which are as exact as torch.set_float32_matmul_precision says.

A row with a value that is infinite or not a number comes out as not a number, all of it. Values of
x~ may be larger than any of x, up to sqrt(d) |x|, and are infinite where the tensor's type does not
reach that far (65504 in float16). Rows of float64 are sent with the range of float32.

On a GPU, decoding waits for the seed, and R and the f are drawn by the CPU.

Source: DRIVE (arXiv 2105.08339), its uniform random rotation and unbiased scale. There all of a
vector has one rotation; the signs that differ from row to row keep the errors of rows apart that
are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnnpipe.comm.packing import pack, unpack, unpack_table
from lightning_gnnpipe.comm.rows import RowCodec, ceil_div, count_rows, split_blocks

_SEED_BYTES, _SCALE_BYTES = 8, 4
_LEAST = 2.0**-126  # rows of zeros are divided by it
_CPU = torch.device("cpu")


class DriveCodec(RowCodec):
    """Sends one bit a value, 32 a row, and 64 a message.

    The payload is the seed, the scales of all rows, then the signs of all rows without gaps. A
    message takes d**2 multiplications a row, and d**3 at times: rows should be short.
    """

    def __init__(self) -> None:
        super().__init__("signs")
        table = unpack_table(1)
        assert table is not None
        self._table = table

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return _SEED_BYTES + _SCALE_BYTES * count_rows(shape) + ceil_div(prod(shape), 8)

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        rows = tensor.contiguous().view(count_rows(tensor.shape), -1)
        num_bytes = self._coded_bytes(tensor.shape, tensor.dtype)
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
        parts = _split(payload, rows.size(0))
        seed &= 0xFFFFFFFF
        parts.seed.fill_(seed)
        turn = _Turn(rows, seed, self._table)
        for part, scale, packed, flips in split_blocks(
            rows, [parts.scales], [parts.signs, turn.flips], 1
        ):
            values = part.to(torch.float32)
            largest = values.abs().amax(1, keepdim=True).clamp_(min=_LEAST)
            values = values / largest
            turned = turn.forth(values * turn.signs_of(flips, values))
            pack((turned >= 0).view(-1), 1, packed)
            length = values.square_().sum(1, keepdim=True)
            torch.div(length, turned.abs_().sum(1, keepdim=True).clamp_(min=_LEAST), out=scale)
            scale.mul_(largest)
        return payload

    def _decode_rows(self, payload: Tensor, rows: Tensor, dtype: torch.dtype) -> None:
        parts = _split(payload, rows.size(0))
        turn = _Turn(rows, int(parts.seed), self._table)
        for part, scale, packed, flips in split_blocks(
            rows, [parts.scales], [parts.signs, turn.flips], 1
        ):
            turned = turn.back(turn.signs_of(packed, part))
            torch.mul(turned.mul_(scale), turn.signs_of(flips, part), out=part)


class _Turn:
    """How a message's rows, `[num_rows, num_channels]`, are turned: the same at both ends.

    Attributes:
        flips: The signs of all rows, a bit each, without gaps, uint8.
    """

    def __init__(self, rows: Tensor, seed: int, table: Tensor) -> None:
        self._matrix = _draw_rotation(rows.size(1), seed >> 8).to(rows.device)
        words = torch.empty(ceil_div(rows.numel(), 64), dtype=torch.int64, device=_CPU)
        words.random_(-(2**63), None, generator=_generator(seed))
        self.flips = words.view(torch.uint8)[: ceil_div(rows.numel(), 8)].to(rows.device)
        self._table = table.to(rows.device)

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


def _split(payload: Tensor, num_rows: int) -> _Parts:
    end = _SEED_BYTES + _SCALE_BYTES * num_rows
    return _Parts(
        payload[:_SEED_BYTES].view(torch.int64)[0],
        payload[_SEED_BYTES:end].view(torch.float32).view(-1, 1),
        payload[end:],
    )


@lru_cache(maxsize=128)  # a step has one for each width and peer, at most 256 KiB each
def _draw_rotation(size: int, seed: int) -> Tensor:
    """Return an orthogonal matrix `[size, size]` of float32, uniform over all of them."""
    generator = _generator(~seed)  # other numbers than the flips
    normal = torch.randn(size, size, dtype=torch.float32, generator=generator, device=_CPU)
    matrix, upper = torch.linalg.qr(normal)
    return matrix * upper.diagonal().sign()  # uniform only so


def _generator(seed: int) -> torch.Generator:
    """Return a CPU's: a GPU's has other numbers."""
    return torch.Generator(_CPU).manual_seed(seed & 0xFFFFFFFF)
