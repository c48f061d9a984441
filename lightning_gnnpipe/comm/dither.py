"""Uniform random numbers for rounding, at the price of one operation a value.

Drawing a number costs as much as all the rest of a codec. So numbers are drawn for one block of
rows, and a key for every row; block after block, each row takes the numbers of its place in the
block, exclusive or its key::

    u[n, j] = block[n % rows_per_block, j] ^ key[n]        24 random bits each

Any two of them are independent: their keys differ, or else their numbers in the block do. So the
errors of any two values are uncorrelated, and a sum over rows is as good as with fresh numbers. It
is only three and more values at a time, of rows a whole number of blocks apart, that show it.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
