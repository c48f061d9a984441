"""Small integers, 8/b of b bits in a byte, and back.

torch has no operation on bits across elements, so both ways take the codes of a byte, a byte each,
as one integer. Neighbours share a byte, the first one its lowest bits. With b=2, 4 codes are a
32-bit integer (little-endian, as all ranks are taken to be)::

    codes, a byte each       d        c        b        a
    one 32-bit integer   ......dd ......cc ......bb ......aa
    times the factor     ddccbbaa ........ ........ ........    the top byte is wanted

The factor adds up the integer shifted by 24, 18, 12 and 6 bits, which takes each code to its place
in the top byte. No two codes meet in a bit, so nothing is carried. Back, each byte is looked up.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # as many bytes as a byte has codes


def pack(integers: Tensor, num_bits: int, out: Tensor) -> None:
    """Write `integers` to `out`, 8/num_bits in a byte; what is left of the last byte is 0.

    Args:
        integers: `[num_codes]`, int32 or bool; the lower 8 bits are below 2**num_bits, others are
            ignored.
        num_bits: 1, 2, 4 or 8.
        out: `[ceil(num_codes * num_bits / 8)]`, uint8.
    """
    if num_bits == 8:
        out.copy_(integers)
        return
    num_codes = integers.numel()
    codes = torch.empty(out.numel() * 8 // num_bits, dtype=torch.uint8, device=out.device)
    codes[:num_codes].copy_(integers)
    codes[num_codes:].zero_()
    words = codes.view(_WORDS[num_bits])
    words.mul_(_factor(num_bits)).bitwise_right_shift_(8 * words.element_size() - 8)
    out.copy_(words)  # the lowest byte of each; the others may be copies of the sign


def unpack(packed: Tensor, table: Tensor | None, out: Tensor) -> None:
    """Undo `pack`.

    Args:
        packed: `[ceil(num_codes * num_bits / 8)]`, uint8.
        table: `unpack_table(num_bits)`, on the device of `packed`.
        out: `[num_codes]`, of any dtype.
    """
    codes = packed
    if table is not None:
        codes = table.index_select(0, packed.to(torch.int32)).view(torch.uint8)
    out.copy_(codes[: out.numel()])


def unpack_table(num_bits: int) -> Tensor | None:
    """Return `[256]`: the codes of each byte, a byte each, as one integer; none for 8 bits."""
    if num_bits == 8:
        return None
    places = torch.arange(0, 8, num_bits, device="cpu")
    codes = (torch.arange(256, device="cpu")[:, None] >> places) & (2**num_bits - 1)
    return codes.to(torch.uint8).view(_WORDS[num_bits]).flatten()


def _factor(num_bits: int) -> int:
    """Return the factor of the drawing above, as the signed integer of the same bits."""
    num_codes = 8 // num_bits
    top = 8 * num_codes - 8
    factor = sum(1 << (top - (8 - num_bits) * place) for place in range(num_codes))
    return factor - ((factor >> (top + 7)) << (top + 8))
