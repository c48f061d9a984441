"""Rows of b-bit integers, rounded at random such that the mean of what comes out is what went in.

A row lies between two 16-bit floats, `low` and `high`; 2**b - 1 steps lead from one to the other.
A value is sent as the number of the step below it or of that above it, as chance will have it::

    step   = (high - low) / (2**b - 1)
    code   = floor((x - low) / step + u)        u uniform in [0, 1), see `dither`
    x~     = low + code * step                  E[x~] = x

The last line holds because `low` is rounded down to 16 bits and `high` up, before codes are
computed with what is sent: no value is outside. Both are bfloat16, whose range is that of float32:
float16 would end at 65504, and know no gradients below 6e-8. A tensor of 16 bits has its own type
for them, and nothing is rounded. The line holds but for the rounding of float32 (below 1e-6 of a
row's range), and of the tensor's type where that is shorter.

A row with a value that is infinite or not a number comes out as not a number, all of it. So does a
row that spans more than float32 can (3.4e38).

Source: Sylvie (arXiv 2303.01277), Low-bit Module. There the minimum and the scale are float16,
rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import torch
from torch import Tensor

from lightning_gnnpipe.comm.dither import Dither
from lightning_gnnpipe.comm.packing import pack_bits, unpack_bits, unpack_table
from lightning_gnnpipe.comm.payload import Codec
from lightning_gnnpipe.comm.rows import ceil_div, count_rows, rows_per_block, split_blocks

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
