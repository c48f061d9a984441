"""Low-bit rows: scaled, rounded at random so that the mean stays right, and packed.

A row lies between two bfloat16 numbers, `low` and `high`; 2**b - 1 steps lead from one to the
other. A value is sent as the number of the step below it or above it, at random::

    step   = (high - low) / (2**b - 1)
    code   = floor((x - low) / step + u)        u uniform in [0, 1)
    x~     = low + code * step                  E[x~] = x

The mean is right because `low` is rounded down to 16 bits and `high` up, before codes are computed:
no value is outside. It holds but for the rounding of float32 (below 1e-6 of a row's range), and of
a shorter dtype of the tensor. A row with a value that is infinite or not a number, or that spans
more than 3.4e38, comes out as not a number.

Random numbers cost as much as all the rest. So they are drawn for one block of rows, and a key for
every row; each row takes the numbers of its place in the block, exclusive or its key::

    u[n, j] = block[n % rows_per_block, j] ^ key[n]        24 random bits each

Any two of them are independent, so a sum over rows is as good as with fresh numbers.

Rows are processed in blocks that fit into a core's cache. Bits are packed eight in a byte by one
multiplication of a 64-bit integer: the factor adds up the integer shifted by 56, 49, .. 7 places,
which takes each bit to its place in the top byte. No two bits meet, so nothing is carried. To
unpack, each byte is looked up.

Source: Sylvie (arXiv 2303.01277), Low-bit Module; minimum and scale are float16 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod

import torch
from torch import Tensor

from lightning_gnnpipe.codecs.payload import Codec

_NUM_BITS = 24  # what a float32 in [0, 1) resolves; 8 would shift means by up to 1/512 of a step


class Dither:
    """Uniform numbers in [0, 1) for the values of a tensor, to be taken block by block.

    Args:
        num_rows: Of the tensor.
        block_shape: `(rows_per_block, num_channels)`.
        seed: Of a generator of its own; its lower 32 bits count.
        device: Of the tensor.
    """

    def __init__(
        self, num_rows: int, block_shape: tuple[int, int], seed: int, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed & 0xFFFFFFFF)
        self._block = _draw(block_shape[0] * block_shape[1], generator).view(block_shape)
        self._keys = _draw(num_rows, generator).view(-1, 1)
        self._mixed = torch.empty_like(self._block)

    def add_to(self, values: Tensor, start: int) -> None:
        """Add a number to each of `values`, `[num_rows, num_channels]`, float32; a block at most.

        Args:
            values: The tensor's rows from `start` on.
            start: A multiple of `rows_per_block`.
        """
        num_rows = values.size(0)
        mixed = self._mixed[:num_rows]
        keys = self._keys[start : start + num_rows]
        torch.bitwise_xor(self._block[:num_rows], keys, out=mixed)
        floats = mixed.view(torch.float32)  # in the same place: less to keep in the cache
        floats.copy_(mixed)
        values.add_(floats, alpha=2.0**-_NUM_BITS)


def _draw(count: int, generator: torch.Generator) -> Tensor:
    """Return `[count]` integers of int32, uniform in [0, 2**24); two are made of one draw."""
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64, device=generator.device)
    pairs.random_(-(2**63), None, generator=generator)
    return pairs.view(torch.int32)[:count].bitwise_and_(2**_NUM_BITS - 1)


_FACTOR = sum(1 << (56 - 7 * place) for place in range(8))


def pack_bits(integers: Tensor, out: Tensor) -> None:
    """Write `integers` to `out`, eight in a byte; what is left of the last byte is 0.

    Args:
        integers: `[num_bits]`, int32: 0 or 1 in the lower 8 bits, others are ignored.
        out: `[ceil(num_bits / 8)]`, uint8.
    """
    bits = torch.empty(out.numel() * 8, dtype=torch.uint8, device=out.device)
    bits[: integers.numel()].copy_(integers)
    bits[integers.numel() :].zero_()
    words = bits.view(torch.int64)
    out.copy_(words.mul_(_FACTOR).bitwise_right_shift_(56))  # the others may be copies of the sign


def unpack_bits(packed: Tensor, table: Tensor, out: Tensor) -> None:
    """Undo `pack_bits`.

    Args:
        packed: `[ceil(num_bits / 8)]`, uint8.
        table: `unpack_table()`, on the device of `packed`.
        out: `[num_bits]`, of any dtype.
    """
    bits = table.index_select(0, packed.to(torch.int32)).view(torch.uint8)
    out.copy_(bits[: out.numel()])


def unpack_table() -> Tensor:
    """Return `[256]`: the bits of each byte, a byte each, as one integer."""
    places = torch.arange(8, device="cpu")
    bits = (torch.arange(256, device="cpu")[:, None] >> places) & 1
    return bits.to(torch.uint8).view(torch.int64).flatten()


BLOCK_CPU = 2**16  # values at a time: with all that they need, they stay in a cache of 1 MiB
_BLOCK_GPU = 2**24


def count_rows(shape: Sequence[int]) -> int:
    """Return the rows of a tensor: all its dimensions but the first are channels."""
    return shape[0] if shape else 1


def ceil_div(count: int, by: int) -> int:
    """Return `count / by`, rounded up."""
    return -(-count // by)


def rows_per_block(rows: Tensor) -> int:
    """Return how many rows to take at a time: all, or a multiple of 8, whose codes fill bytes."""
    num_values = BLOCK_CPU if rows.device.type == "cpu" else _BLOCK_GPU
    return min(rows.size(0), max(8, num_values // rows.size(1) // 8 * 8))


def split_blocks(
    rows: Tensor, by_row: Sequence[Tensor], packed: Tensor, num_bits: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield `rows`, `by_row` and `packed` in blocks of rows.

    Args:
        rows: `[num_rows, num_channels]`.
        by_row: `[num_rows, *]` each.
        packed: Codes of all values, without gaps, uint8.
        num_bits: Of each code.
    """
    block = rows_per_block(rows)
    num_bytes = ceil_div(block * rows.size(1) * num_bits, 8)
    parts = [torch.split(tensor, block) for tensor in (rows, *by_row)]
    return zip(*parts, torch.split(packed, num_bytes), strict=True)


_LEAST_RANGE = 2.0**-117  # so that 1 / step is finite; constant rows have it, with codes of 0
_MARGIN = 1 - 2.0**-21  # or float32 might round the code of `high` up to 2**b


class LowBitCodec(Codec):
    """Sends `num_bits` bits a value, and 32 bits a row.

    The payload is `low` of all rows, `high` of all rows, then the codes of all rows without gaps.

    Args:
        num_bits: 1 or 8.
    """

    def __init__(self, num_bits: int) -> None:
        super().__init__(f"int{num_bits}")
        self.num_bits = num_bits
        self.num_steps = 2**num_bits - 1
        self._table = unpack_table() if num_bits == 1 else None

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return 4 * count_rows(shape) + ceil_div(prod(shape) * self.num_bits, 8)

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        rows = tensor.reshape(count_rows(tensor.shape), -1)
        num_bytes = self._coded_bytes(tensor.shape, tensor.dtype)
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
        ends, packed = _split(payload, rows.size(0), rows.dtype)
        ends[0].copy_(_round_outwards(rows.amin(1), -inf))
        ends[1].copy_(_round_outwards(rows.amax(1), inf))
        low, length = _span(ends)
        num_rows, num_channels = rows.shape
        block = rows_per_block(rows)
        dither = Dither(num_rows, (block, num_channels), seed, rows.device)
        values = torch.empty(block, num_channels, dtype=torch.float32, device=rows.device)
        by_row = low, self.num_steps * _MARGIN / length
        blocks = split_blocks(rows, by_row, packed, self.num_bits)
        for index, (part, start, scale, out) in enumerate(blocks):
            steps = values[: part.size(0)]
            torch.sub(part.to(torch.float32), start, out=steps)
            dither.add_to(steps.mul_(scale), index * block)
            floors = steps.view(torch.int32)  # in the same place: less to keep in the cache
            floors.copy_(steps)  # drops what is behind the point; nothing is negative
            if self.num_bits == 1:
                pack_bits(floors.view(-1), out)
            else:
                out.copy_(floors.view(-1))
        return payload

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        is_direct = out.dtype == torch.float32 and out.is_contiguous()
        values = (
            out if is_direct else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        )
        self._decode_rows(payload, values.view(count_rows(out.shape), -1), out.dtype)
        if not is_direct:
            out.copy_(values)

    def _decode_rows(self, payload: Tensor, rows: Tensor, dtype: torch.dtype) -> None:
        """Overwrite `rows`, `[num_rows, num_channels]`, float32, of a tensor that had `dtype`."""
        ends, packed = _split(payload, rows.size(0), dtype)
        low, length = _span(ends)
        table = None if self._table is None else self._table.to(rows.device)
        by_row = low, length / self.num_steps
        for part, start, step, source in split_blocks(rows, by_row, packed, self.num_bits):
            if table is None:
                part.view(-1).copy_(source)
            else:
                unpack_bits(source, table, part.view(-1))
            part.mul_(step).add_(start)


def _split(payload: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of the payload: the ends of rows `[2, num_rows]`, and their codes."""
    of_ends = dtype if dtype.itemsize == 2 else torch.bfloat16
    num_bytes = 4 * num_rows
    return payload[:num_bytes].view(of_ends).view(2, -1), payload[num_bytes:]


def _round_outwards(ends: Tensor, towards: float) -> Tensor:
    """Return the 16-bit floats next to `ends`, or equal to them; none on the inner side."""
    if ends.element_size() == 2:
        return ends
    ends = ends.to(torch.float32)
    near = ends.to(torch.bfloat16)
    is_inside = near > ends if towards < 0 else near < ends
    return torch.where(is_inside, near.nextafter(torch.full_like(near, towards)), near)


def _span(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return where rows begin, and how long they are: `[num_rows, 1]`, float32.

    A row that is not finite has length nan or inf, so all its codes are 0, and 0 * inf is nan too.
    """
    low, high = ends.to(torch.float32).unsqueeze(-1)
    return low, (high - low).clamp(min=_LEAST_RANGE)
