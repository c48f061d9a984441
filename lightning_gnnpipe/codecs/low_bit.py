"""Low-bit codec: scale rows, round them at random without bias, and pack the bits.

A row lies between two bfloat16 numbers, `low` and `high`, with 2**b - 1 steps between them. A value
is sent as the number of the step below it or above it, at random::

    step   = (high - low) / (2**b - 1)
    code   = floor((x - low) / step + u)        u uniform in [0, 1)
    x~     = low + code * step                  E[x~] = x

No value is outside, because `low` is rounded down and `high` up before codes are computed. The mean
is exact up to rounding to float32 (below 1e-6 of a row's range) or to the tensor's shorter dtype.
A row that has inf or nan, or spans more than 3.4e38, decodes to nan.

Drawing random numbers costs as much as everything else. So they are drawn for one block of rows,
plus a key for every row::

    u[n, j] = block[n % rows_per_block, j] ^ key[n]        24 random bits each

Any two of them are independent, so the variance of a sum over rows is that of fresh numbers.

Source: Sylvie (arXiv 2303.01277), Low-bit Module; minimum and scale are float16 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import inf, prod

import torch
from torch import Tensor

from lightning_gnnpipe.codecs.payload import Codec

_NUM_BITS = 24  # resolution of float32 in [0, 1); 8 would shift means by up to 1/512 step


class _Dither:
    """Uniform random numbers in [0, 1) for blocks of shape `(rows_per_block, num_channels)`."""

    def __init__(
        self, num_rows: int, block_shape: tuple[int, int], seed: int, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed & 0xFFFFFFFF)
        self._block = _draw(block_shape[0] * block_shape[1], generator).view(block_shape)
        self._keys = _draw(num_rows, generator).view(-1, 1)
        self._mixed = torch.empty_like(self._block)

    def add_to(self, values: Tensor, start: int) -> None:
        """Add random numbers to `values`, float32: one block of rows at most, from row `start`."""
        num_rows = values.size(0)
        mixed, keys = self._mixed[:num_rows], self._keys[start : start + num_rows]
        torch.bitwise_xor(self._block[:num_rows], keys, out=mixed)
        floats = mixed.view(torch.float32)  # in place, to use less of the cache
        floats.copy_(mixed)
        values.add_(floats, alpha=2.0**-_NUM_BITS)


def _draw(count: int, generator: torch.Generator) -> Tensor:
    """Return `[count]` int32, uniform in [0, 2**24); each 64-bit draw gives two."""
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64, device=generator.device)
    pairs.random_(-(2**63), None, generator=generator)
    return pairs.view(torch.int32)[:count].bitwise_and_(2**_NUM_BITS - 1)


# Adds up an integer shifted by 56, 49, .. 7 places: each of its eight bits, one per byte, moves to
# its place in the top byte without a carry.
_FACTOR = sum(1 << (56 - 7 * place) for place in range(8))


def _pack_bits(integers: Tensor, out: Tensor) -> None:
    """Pack the lowest bits of `integers`, int32, into `out`, uint8: eight per byte, then 0."""
    bits = torch.empty(out.numel() * 8, dtype=torch.uint8, device=out.device)
    bits[: integers.numel()].copy_(integers)
    bits[integers.numel() :].zero_()
    words = bits.view(torch.int64)
    # The shift copies the sign into the upper bytes, which uint8 drops.
    out.copy_(words.mul_(_FACTOR).bitwise_right_shift_(56))


def _unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits that `_pack_bits` has packed, as uint8."""
    table = _bits_of_bytes(packed.device)
    return table.index_select(0, packed.to(torch.int32)).view(torch.uint8)[:count]


@cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """Return `[256]` int64: the bits of each byte, one per byte of the integer."""
    places = torch.arange(8, device=device)
    bits = (torch.arange(256, device=device)[:, None] >> places) & 1
    return bits.to(torch.uint8).view(torch.int64).flatten()


BLOCK_CPU = 2**16  # values per block: all its buffers fit into a cache of 1 MiB
_BLOCK_GPU = 2**24


def _count_rows(shape: Sequence[int]) -> int:
    """Return the rows of a tensor: its first dimension, or 1 for a scalar."""
    return shape[0] if shape else 1


def _num_bytes(num_values: int, num_bits: int) -> int:
    return (num_values * num_bits + 7) // 8


def _rows_per_block(rows: Tensor) -> int:
    """Return the rows per block: all, or a multiple of 8, whose codes fill bytes."""
    num_values = BLOCK_CPU if rows.device.type == "cpu" else _BLOCK_GPU
    return min(rows.size(0), max(8, num_values // rows.size(1) // 8 * 8))


def _split_blocks(
    rows: Tensor, by_row: Sequence[Tensor], packed: Tensor, num_bits: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of `rows`, of each tensor in `by_row`, and of `packed` (`num_bits` per code)."""
    block = _rows_per_block(rows)
    parts = [torch.split(tensor, block) for tensor in (rows, *by_row)]
    codes = torch.split(packed, _num_bytes(block * rows.size(1), num_bits))
    return zip(*parts, codes, strict=True)


_LEAST_RANGE = 2.0**-117  # keeps 1 / step finite for constant rows, whose codes are 0
_MARGIN = 1 - 2.0**-21  # else float32 might round the code of `high` up to 2**b


class LowBitCodec(Codec):
    """Sends `num_bits`, 1 or 8, bits per value, and 32 bits per row.

    The payload is `low` of all rows, `high` of all rows, then the codes of all rows without gaps.
    """

    def __init__(self, num_bits: int) -> None:
        super().__init__(f"int{num_bits}")
        self.num_bits = num_bits
        self.num_steps = 2**num_bits - 1

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return 4 * _count_rows(shape) + _num_bytes(prod(shape), self.num_bits)

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        rows = tensor.reshape(_count_rows(tensor.shape), -1)
        num_bytes = self._coded_bytes(tensor.shape, tensor.dtype)
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
        ends, packed = _split(payload, rows.size(0), rows.dtype)
        ends[0].copy_(_round_outwards(rows.amin(1), -inf))
        ends[1].copy_(_round_outwards(rows.amax(1), inf))
        low, length = _span(ends)
        num_rows, num_channels = rows.shape
        block = _rows_per_block(rows)
        dither = _Dither(num_rows, (block, num_channels), seed, rows.device)
        values = torch.empty(block, num_channels, dtype=torch.float32, device=rows.device)
        by_row = low, self.num_steps * _MARGIN / length
        blocks = _split_blocks(rows, by_row, packed, self.num_bits)
        for index, (part, start, scale, out) in enumerate(blocks):
            steps = values[: part.size(0)]
            torch.sub(part.to(torch.float32), start, out=steps)
            dither.add_to(steps.mul_(scale), index * block)
            floors = steps.view(torch.int32)  # in place, to use less of the cache
            floors.copy_(steps)  # floor, since no value is negative
            if self.num_bits == 1:
                _pack_bits(floors.view(-1), out)
            else:
                out.copy_(floors.view(-1))
        return payload

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        is_direct = out.dtype == torch.float32 and out.is_contiguous()
        values = out if is_direct else out.new_empty(out.shape, dtype=torch.float32)
        rows = values.view(_count_rows(out.shape), -1)
        ends, packed = _split(payload, rows.size(0), out.dtype)
        low, length = _span(ends)
        by_row = low, length / self.num_steps
        for part, start, step, source in _split_blocks(rows, by_row, packed, self.num_bits):
            codes = source if self.num_bits == 8 else _unpack_bits(source, part.numel())
            part.view(-1).copy_(codes)
            part.mul_(step).add_(start)
        if not is_direct:
            out.copy_(values)


def _split(payload: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of the payload: `low` and `high`, `[2, num_rows]`, and the codes."""
    of_ends = dtype if dtype.itemsize == 2 else torch.bfloat16
    num_bytes = 4 * num_rows
    return payload[:num_bytes].view(of_ends).view(2, -1), payload[num_bytes:]


def _round_outwards(ends: Tensor, towards: float) -> Tensor:
    """Round to 16-bit floats in the direction of `towards`; 16-bit `ends` stay unchanged."""
    if ends.element_size() == 2:
        return ends
    ends = ends.to(torch.float32)
    near = ends.to(torch.bfloat16)
    is_inside = near > ends if towards < 0 else near < ends
    return torch.where(is_inside, near.nextafter(torch.full_like(near, towards)), near)


def _span(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return start and length of each row's range: `[num_rows, 1]`, float32.

    A row that is not finite has length nan or inf. Its codes are 0, and 0 * inf decodes to nan.
    """
    low, high = ends.to(torch.float32).unsqueeze(-1)
    return low, (high - low).clamp(min=_LEAST_RANGE)
