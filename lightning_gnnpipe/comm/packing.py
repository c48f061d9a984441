"""Bits, eight in a byte, and back.

torch has no operation on bits across elements, so both ways take eight bits, a byte each, as one
integer. Of eight that share a byte the first is its lowest bit. With three of them (integers are
little-endian, as all ranks are taken to be)::

    bits, a byte each    .......c .......b .......a
    times the factor     .....cba ........ ........    the top byte is wanted

The factor adds up the integer shifted by 16, 9 and 2 places, of all eight by 56, 49, .. 7, which
takes each bit to its place in the top byte. No two bits meet, so nothing is carried. Back, each
byte is looked up.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
