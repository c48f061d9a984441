"""Rows of float32, taken block by block.

All that a block needs stays in a core's cache, which is what makes such a codec fast on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

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
