"""Weighted sums of rows on a GPU: the product of a sparse matrix and a table, a kernel in Triton.

One program sums up to `LONGEST` entries of a row. Longer rows, which are few, are summed in pieces
by several programs, then one program sums the pieces. No two add to the same numbers, so bits
repeat from run to run. Half types are summed in float32.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from lightning_gnnpipe.passing.sparse import SparseRows

# On an H200 the fastest of 36 choices (bf16: by 1 % the second), all rows and 32 chunks added up.
LONGEST = 128
MOST_CHANNELS = 128  # of one program
MOST_ENTRIES = 64  # that a program loads at once
TILE = 2048  # bytes of them


@dataclass(frozen=True, slots=True)
class Pieces:
    """How the entries of the rows are cut; `Pieces.of` waits for the GPU up to three times."""

    starts: Tensor  # `[num_pieces + 1]` start of each piece in the entries
    slots: Tensor | None  # `[num_pieces]` row that each writes; behind the last row: its part
    long_rows: Tensor | None  # `[num_long]` rows of several pieces
    long_starts: Tensor | None  # `[num_long + 1]` first part of each
    num_parts: int  # pieces of long rows

    @classmethod
    def of(cls, offsets: Tensor) -> Pieces:
        """Cut rows that start at `offsets`, `[num_rows + 1]`."""
        num_rows = offsets.numel() - 1
        counts = ((offsets.diff() + LONGEST - 1) // LONGEST).clamp(min=1).long()
        is_long = counts > 1
        num_parts = int((counts * is_long).sum())
        if not num_parts:
            return cls(offsets, None, None, None, 0)
        row = torch.arange(num_rows, device=offsets.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        turn = torch.arange(row.numel(), device=offsets.device) - first[row]
        starts = torch.cat([offsets[row] + turn * LONGEST, offsets[-1:]])
        is_part = is_long[row]
        slots = torch.where(is_part, num_rows - 1 + is_part.cumsum(0), row)
        long_rows = is_long.nonzero().squeeze(1)
        long_starts = F.pad(counts[long_rows].cumsum(0), (1, 0))
        return cls(starts, slots, long_rows, long_starts, num_parts)


def sum_rows(rows: SparseRows, table: Tensor) -> Tensor:
    """Return `rows @ table`, `[num_rows, channels]`; `table` is contiguous."""
    if LONGEST not in rows.cuts:
        rows.cuts[LONGEST] = Pieces.of(rows.offsets)
    pieces: Pieces = rows.cuts[LONGEST]
    channels = table.size(1)
    out = table.new_empty(rows.offsets.numel() - 1, channels)
    if not out.numel():
        return out
    if pieces.slots is None:
        _launch(out, None, table, rows.indices, rows.values, pieces.starts, None)
        return out
    assert pieces.long_starts is not None
    wide = torch.promote_types(table.dtype, torch.float32)  # halves may overflow or round
    parts = table.new_empty(pieces.num_parts, channels, dtype=wide)
    _launch(out, parts, table, rows.indices, rows.values, pieces.starts, pieces.slots)
    _launch(out, None, parts, None, None, pieces.long_starts, pieces.long_rows)
    return out


def _launch(
    out: Tensor,
    parts: Tensor | None,
    table: Tensor,
    indices: Tensor | None,
    values: Tensor | None,
    starts: Tensor,
    slots: Tensor | None,
) -> None:
    channels = table.size(1)
    width = min(MOST_CHANNELS, triton.next_power_of_2(channels))
    height = min(MOST_ENTRIES, max(1, TILE // (width * table.element_size())))
    arguments = (out, parts, table, indices, values, starts, slots, out.size(0), channels)
    is_wide = table.dtype == torch.float64
    on_gpu = table.device.type == "cuda"  # else by Triton's interpreter
    with torch.cuda.device(table.device) if on_gpu else nullcontext():
        _sum_pieces[starts.numel() - 1, triton.cdiv(channels, width)](
            *arguments, wide=is_wide, height=height, width=width, num_warps=1
        )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _sum_pieces(  # type: ignore[no-untyped-def]
    out,
    parts,
    table,
    indices,
    values,
    starts,
    slots,
    num_rows,
    channels,
    wide: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Sum entries `starts[i]` to `starts[i + 1]` to row `slots[i]`.

    No indices: the table's rows in order. Slots behind the last row of `out` are rows of `parts`.
    """
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    is_column = column < channels
    kind = tl.float64 if wide else tl.float32
    total = tl.zeros((width,), kind)
    end = tl.load(starts + number + 1)
    for first in range(tl.load(starts + number), end, height):
        entry = first + tl.arange(0, height)
        is_entry = entry < end
        row = entry if indices is None else tl.load(indices + entry, mask=is_entry, other=0)
        place = table + row.to(tl.int64)[:, None] * channels + column[None, :]
        found = tl.load(place, mask=is_entry[:, None] & is_column[None, :], other=0.0).to(kind)
        if values is not None:
            factor = tl.load(values + entry, mask=is_entry, other=0.0).to(kind)
            found = found * factor[:, None]
        total += tl.sum(found, axis=0)
    slot = number if slots is None else tl.load(slots + number).to(tl.int64)
    place = slot * channels + column
    if parts is None:
        tl.store(out + place, total, mask=is_column)
    else:
        last = num_rows.to(tl.int64) * channels
        tl.store(out + place, total, mask=is_column & (place < last))
        tl.store(parts + place - last, total, mask=is_column & (place >= last))
